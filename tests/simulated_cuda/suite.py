"""All tests that a CUDA device is needed for, on the simulated one: `python -m tests.simulated_cuda.suite`.

In numbers mode: tests marked `gpu`, and tests that are not about one kind of device, with their tensors on this one. In
memory mode, under both settings of the caching allocator: the peaks of the main built-in workloads, with `--peaks` of
all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field

from tests.simulated_cuda.environment import ROOT, set_up_or_tell, variables

EITHER_DEVICE = (
    *(f"tests/executor/test_{name}.py" for name in ("attachment", "bitwise", "in_place", "long_skips", "path")),
    *(f"tests/executor/test_{name}.py" for name in ("recognition", "saved_again", "training_loops", "two_threads")),
    "tests/executor/test_ways_of_training.py",
)
TWO_DEVICES = (
    "tests/executor/test_gpu.py",
    "tests/executor/test_gpu_streams.py",
    "tests/torchtools/test_accelerators.py",
)
# Mode fake times each operator on the device, behind a stream that is kept busy: real seconds for simulated time.
NEITHER = ("-m", "not slow and not gpu", "-k", "not fake")


@dataclass(frozen=True, slots=True)
class Part:
    """One run of pytest.

    Attributes:
        name: for people.
        arguments: pytest's.
        numbers: whether kernels compute.
        variables: further variables.
        devices: how many devices there are.
    """

    name: str
    arguments: tuple[str, ...]
    numbers: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    devices: int = 1


PARTS = (
    Part(
        "tests that need a GPU", ("tests", "-m", "gpu and not slow", "--ignore=tests/simulated_cuda/test_workloads.py")
    ),
    Part("tests for either device", (*EITHER_DEVICE, *NEITHER), True, {"POOCH_TEST_DEVICE": "cuda"}),
    Part("tests of two devices", (*TWO_DEVICES, "-k", "two_devices or second_device or another_device"), devices=2),
)
PEAKS = ("tests/simulated_cuda/test_workloads.py", "--dist", "loadgroup")
MAIN_WORKLOADS = ("-k", "allocator or resnet50 or unet3d or gpt2 or llama or lstm")
ALLOCATORS = {"": {}, ", expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
AT_ONCE = {"SIMULATED_CUDA_KERNEL_US": "0", "SIMULATED_CUDA_COPY_GB_PER_S": "1000"}  # times mean nothing there


def peaks(of: str, selection: tuple[str, ...] = ()) -> list[Part]:
    """The peaks of workloads, under each setting of the allocator.

    Args:
        of: which, for people.
        selection: further arguments of pytest that choose them; none: all.
    """
    arguments = (*PEAKS, *selection)
    return [Part(f"peaks of {of}{told}", arguments, False, AT_ONCE | more) for told, more in ALLOCATORS.items()]


def run(part: Part) -> int:
    """Run one part and return pytest's exit code.

    Args:
        part: what to run.
    """
    sys.stdout.write(f"== simulated CUDA: {part.name}\n")
    sys.stdout.flush()
    environment = variables(part.numbers, devices=part.devices, inherited={**os.environ, **part.variables})
    return subprocess.run(["pytest", "-q", "-n", "2", *part.arguments], env=environment, cwd=ROOT).returncode


def main() -> int:
    """Exit code 0: nothing failed, or the device cannot be set up here, which is said."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.suite", description=__doc__)
    parser.add_argument("--peaks", action="store_true", help="the peaks of all workloads, not only of the main ones")
    of_peaks = peaks("all workloads") if parser.parse_args().peaks else peaks("the main workloads", MAIN_WORKLOADS)
    if not set_up_or_tell():
        return 0
    return max(run(part) for part in (*PARTS, *of_peaks))


if __name__ == "__main__":
    sys.exit(main())
