"""The child process of `checking`: compares planned with plain training under deterministic algorithms."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pooch.api.children import errors_told, tell
from pooch.errors import PoochError
from pooch.ir import Plan
from pooch.measure.checking import compared
from pooch.torchtools.determinism import deterministic_algorithms, use_deterministic_algorithms
from pooch.workloads.loading import WorkloadFactory

if TYPE_CHECKING:
    from pooch.workloads import Workload


def _tell_progress(text: str) -> None:
    tell({"progress": [text]})


def main() -> None:
    """Read the job, compare, tell the outcome."""
    job = json.loads(sys.stdin.read())
    with errors_told():
        factory = WorkloadFactory(**job["workload"])

        def build() -> Workload:
            workload = factory()
            use_deterministic_algorithms()  # whatever the user's file has set
            return workload

        with deterministic_algorithms() as operators:
            try:
                found = compared(build, Plan.load(job["plan_path"]), job["steps"], _tell_progress)
            except (RuntimeError, MemoryError) as error:  # memory that ran out, say
                raise PoochError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None
        tell({"done": asdict(replace(found, operators=tuple(operators)))})


if __name__ == "__main__":
    main()
