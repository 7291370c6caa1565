"""One part of a run, in a process of its own: `python -m benchmarks.gpu.part NAME --out part.json`.

Writes {"status", "why", "data"} when it is done, and {"data"} whenever there is something new, so that what was
measured before a timeout is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.job import Job, Verdict


def find(name: str) -> Callable[[Job], Verdict]:
    """The function of a part; imports only what that part needs."""
    if name.startswith("tests:"):
        from benchmarks.gpu.marked_tests import run
    elif name == "race":
        from benchmarks.gpu.race import run
    elif name == "links":
        from benchmarks.gpu.links import run
    elif name == "hooks":
        from benchmarks.gpu.hooks import run
    elif name.startswith("auto:"):
        from benchmarks.gpu.under_auto import run
    elif name == "doctor":
        from benchmarks.gpu.doctor import run
    elif name.startswith("workload:"):
        from benchmarks.gpu.workload import run
    else:
        raise SystemExit(f"there is no part {name!r}")
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--profiles", type=Path, default=Path("build/gpu"))
    given = parser.parse_args()
    deadline_s = time.monotonic() + given.seconds
    job = Job(given.name, given.device, given.small, deadline_s, given.profiles, given.out)
    verdict = find(given.name)(job)
    job.write({"status": verdict.status, "why": verdict.why, "data": job.data})
    return 0


if __name__ == "__main__":
    sys.exit(main())
