"""All tests that a CUDA device is needed for, on the simulated one: `python -m tests.simulated_cuda.suite`.

In numbers mode: the parts that `make gpu` runs on a real device, and the slow tests, for which it has no time. In
memory mode, under both settings of the caching allocator: the peaks of the main built-in workloads, with `--peaks` of
all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.device_parts import NEEDS_A_GPU, PARTS, DevicePart
from tests.simulated_cuda.environment import ROOT, set_up_or_tell, variables

WORKLOADS = "tests/simulated_cuda/test_workloads.py"
MAIN_WORKLOADS = ("-k", "allocator or resnet50 or unet3d or gpt2 or llama or lstm")
ALLOCATORS = {"": {}, "-expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
AT_ONCE = {"SIMULATED_CUDA_KERNEL_US": "0", "SIMULATED_CUDA_COPY_GB_PER_S": "1000"}  # times mean nothing there

SLOW = DevicePart(
    "gpu-slow", NEEDS_A_GPU, (f"--ignore={WORKLOADS}",), "tests/simulated_cuda/test_counters.py", marks="gpu and slow"
)


def peaks(selection: tuple[str, ...] = ()) -> list[DevicePart]:
    """The peaks of workloads, under each setting of the allocator.

    Args:
        selection: arguments of pytest that choose them; none: all.
    """
    options = ("--dist", "loadgroup", *selection)
    return [
        DevicePart(f"peaks{name}", (WORKLOADS,), options, WORKLOADS, AT_ONCE | more)
        for name, more in ALLOCATORS.items()
    ]


def run(part: DevicePart, numbers: bool) -> int:
    """Run one part and return pytest's exit code.

    Args:
        part: what to run.
        numbers: whether kernels compute.
    """
    sys.stdout.write(f"== simulated CUDA: {part.name}\n")
    sys.stdout.flush()
    environment = variables(numbers, devices=part.devices, inherited={**os.environ, **part.variables})
    command = ["pytest", "-q", "-n", "2", "-m", part.marks, *part.options, *part.paths]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def main() -> int:
    """Exit code 0: nothing failed, or the device cannot be set up here, which is said."""
    names = [part.name for part in (*PARTS, SLOW, *peaks())]
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.suite", description=__doc__)
    parser.add_argument("--peaks", action="store_true", help="the peaks of all workloads, not only of the main ones")
    parser.add_argument("--part", action="append", choices=names, help="default: all")
    arguments = parser.parse_args()
    if not set_up_or_tell():
        return 0
    of_peaks = peaks() if arguments.peaks else peaks(MAIN_WORKLOADS)
    chosen = [(part, True) for part in (*PARTS, SLOW)] + [(part, False) for part in of_peaks]
    return max(run(part, numbers) for part, numbers in chosen if not arguments.part or part.name in arguments.part)


if __name__ == "__main__":
    sys.exit(main())
