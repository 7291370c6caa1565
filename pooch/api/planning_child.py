"""The child process of `planning_aside`: reads a job, plans, and writes the plan to a file.

Whatever takes long to import comes in `main`, so that Ctrl-C ends this process without a word.
"""

from __future__ import annotations

import signal
from contextlib import suppress

from .children import errors_sent, received, send


def main() -> None:
    """Read the job, plan, write the plan."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells switch off in the background
    job = received()
    with suppress(KeyboardInterrupt), errors_sent():
        _plan(job["folder"])


def _plan(name: str) -> None:
    import pickle
    from pathlib import Path

    from .planning import budget_in_bytes, plan_here
    from .planning_aside import JOB, PLAN

    folder = Path(name)
    profile, budget, options, known, start = pickle.loads((folder / JOB).read_bytes())
    made = plan_here(
        profile,
        budget_in_bytes(profile, budget, options),
        options,
        known=known,
        start=start,
        progress=lambda text, share: send({"progress": [text, share]}),
    )
    (folder / PLAN).write_bytes(pickle.dumps(made))
    send({"done": True})


if __name__ == "__main__":
    main()
