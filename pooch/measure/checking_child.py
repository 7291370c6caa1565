"""The child process of `checking`: compares planned with plain training under deterministic algorithms."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ..api.children import errors_sent, received, send
from ..api.wire import WIRE
from ..errors import PoochError, first_line
from ..torchtools.determinism import deterministic_algorithms, use_deterministic_algorithms
from ..workloads.loading import WorkloadFactory
from .checking import compared

if TYPE_CHECKING:
    from ..workloads import Workload


def main() -> None:
    """Read the job, compare, and write the result."""
    job = received()
    with errors_sent():
        factory = WorkloadFactory(**job["workload"])

        def build() -> Workload:
            workload = factory()
            use_deterministic_algorithms()  # also if the user's file turns them off
            return workload

        def progress(text: str) -> None:
            send({"progress": [text]})

        with deterministic_algorithms() as operators:
            try:
                found = compared(build, WIRE.made(job["plan"]), job["steps"], progress)
            except (RuntimeError, MemoryError) as error:  # out of memory, for example
                raise PoochError(first_line(error)) from None
        send({"done": asdict(replace(found, operators=tuple(operators)))})


if __name__ == "__main__":
    main()
