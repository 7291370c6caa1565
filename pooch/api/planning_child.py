"""The child process of `planning_aside`: reads a job from standard input, plans, and writes the plan to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..ir import Plan, Profile
from .children import errors_sent, send
from .options import PlanOptions
from .planning import plan_here


def main() -> None:
    """Read the job, plan, write the plan."""
    job = json.loads(sys.stdin.read())
    folder = Path(job["folder"])
    known = [Plan.load(folder / f"known-{number}.json") for number in range(job["known"])]
    with errors_sent():
        made = plan_here(
            Profile.load(folder / "profile.json"),
            job["budget_bytes"],
            PlanOptions(**job["options"]),
            known=known,
            start=None if job["start"] is None else dict(job["start"]),
            progress=lambda text, share: send({"progress": [text, share]}),
        )
        made.save(folder / "plan.json")
        send({"done": True})


if __name__ == "__main__":
    main()
