"""Run a command on the simulated CUDA device: `python -m tests.simulated_cuda [options] COMMAND ...`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.simulated_cuda.environment import Unavailable, set_up, variables


def main() -> int:
    """Set the device up where that is not done yet, then run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--numbers", action="store_true", help="kernels compute, on the CPU; otherwise they only take time"
    )
    parser.add_argument("--device-memory-mib", type=int, default=4096, help="memory of each device (4096)")
    parser.add_argument("--devices", type=int, default=1, help="how many devices there are (1)")
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        help="the caching allocator maps memory instead of asking for blocks",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run; nothing: only set up")
    arguments = parser.parse_args()
    try:
        set_up()
    except (Unavailable, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"The simulated CUDA device cannot be set up here: {error}\n")
        return 3
    if not arguments.command:
        return 0
    environment = variables(
        arguments.numbers,
        arguments.device_memory_mib,
        arguments.devices,
        expandable_segments=arguments.expandable_segments,
    )
    return subprocess.run(arguments.command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
