"""Which tests run on a CUDA device, in parts: the same ones on the simulated device (`make simulated-cuda-tests`) and
on a real one (`make gpu`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

NEEDS_A_GPU = (
    *("tests/executor", "tests/workloads", "tests/measure/test_gpu_limits.py", "tests/simulated_cuda"),
    "tests/api/test_shared_memory.py",
    "tests/autopilot/test_free_budget.py",
    "tests/autopilot/test_reserved_budget.py",
    "tests/autopilot/test_gpu.py",
    "tests/autopilot/test_graphs_of_backward_passes.py",
    "tests/autopilot/test_persistence_gpu.py",
    "tests/autopilot/test_built_on_the_host.py",
    "tests/doctor/test_gpu.py",
    "tests/profiler/test_workspaces.py",
    *(
        f"tests/torchtools/test_{name}.py"
        for name in ("accelerators", "memory_on_a_gpu", "peak_counters", "requested_sizes", "rounding", "threads")
    ),
)
EITHER_DEVICE = (
    *(f"tests/executor/test_{name}.py" for name in ("attachment", "bitwise", "in_place", "long_skips", "operators")),
    *(f"tests/executor/test_{name}.py" for name in ("path", "peaks", "recognition", "saved_again", "training_loops")),
    *(f"tests/executor/test_{name}.py" for name in ("two_threads", "watching_the_budget", "ways_of_training")),
    "tests/api/test_guarding.py",
)
TWO_DEVICES = (
    "tests/executor/test_gpu.py",
    "tests/executor/test_gpu_streams.py",
    "tests/torchtools/test_accelerators.py",
)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One run of pytest on a CUDA device.

    Attributes:
        name: short, for commands and reports.
        paths: files and folders of tests.
        options: pytest's, which choose among these tests.
        marks: pytest's expression that chooses among them by their marks.
        rehearsed: a file of them that stands for all where a run is only rehearsed.
        variables: of the environment.
        devices: how many devices the tests need; where there are fewer, they skip.
    """

    name: str
    paths: tuple[str, ...]
    options: tuple[str, ...]
    rehearsed: str
    variables: dict[str, str] = field(default_factory=dict)
    devices: int = 1
    marks: str = ""


PARTS = (
    DevicePart(
        "gpu",
        NEEDS_A_GPU,
        # The peaks of all workloads are a run of their own: `python -m tests.simulated_cuda.suite --peaks`.
        ("--ignore=tests/simulated_cuda/test_workloads.py",),
        "tests/executor/test_gpu.py",
        marks="gpu and not slow",
    ),
    DevicePart(
        "either-device",
        EITHER_DEVICE,
        # Mode fake times each operator on the device, behind a busy stream: real seconds for simulated ones.
        ("-k", "not fake"),
        "tests/executor/test_path.py",
        {"POOCH_TEST_DEVICE": "cuda"},
        marks="not slow and not gpu",
    ),
    DevicePart(
        "two-devices",
        TWO_DEVICES,
        ("-k", "two_devices or second_device or another_device"),
        "tests/executor/test_gpu.py",
        devices=2,
    ),
)
