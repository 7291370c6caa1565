"""The child process of `planning_aside`: reads a job, plans, and tells the plan.

Whatever takes long to import comes in `main`, so that Ctrl-C ends this process without a word.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

from .children import errors_sent, received, send


def main() -> None:
    """Read the job, plan, tell the plan."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells switch off in the background
    job = received()
    with suppress(KeyboardInterrupt), errors_sent():
        _plan(job["arguments"])


def _plan(arguments: Any) -> None:
    from .planning import plan_here
    from .wire import WIRE

    profile, budget, options, known, start = WIRE.made(arguments)
    made = plan_here(
        profile,
        budget,
        options,
        known=known,
        start=start,
        progress=lambda text, share: send({"progress": [text, share]}),
    )
    send({"done": WIRE.plain(made)})


if __name__ == "__main__":
    main()
