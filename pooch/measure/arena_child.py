"""The child process of `arena_training`: trains on an arena of a device whose allocator has to be chosen first."""

from __future__ import annotations

from ..api.arenas import install_cuda_arena
from ..api.children import errors_sent, received, send
from ..api.wire import WIRE
from ..errors import PoochError, first_line
from ..workloads.loading import WorkloadFactory
from .arena_training import train


def main() -> None:
    """Read the job, train, and write the result."""
    job = received()
    with errors_sent():
        install_cuda_arena()
        plan = WIRE.made(job["plan"])

        def progress(text: str) -> None:
            send({"progress": [text]})

        try:
            factory, steps, verify = WorkloadFactory(**job["workload"]), job["steps"], job["verify"]
            trained = train(factory, plan, steps, progress, on_arena=True, verify=verify)
        except (RuntimeError, MemoryError) as error:  # out of memory, for example
            raise PoochError(first_line(error)) from None
        send({"done": trained.record()})


if __name__ == "__main__":
    main()
