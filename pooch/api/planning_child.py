"""The child process of `planning_aside`: reads a job from standard input, makes one plan, and writes it to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pooch.api.children import errors_told, tell
from pooch.api.planning import plan_here
from pooch.ir import Plan, Profile


def main() -> None:
    """Read the job, plan, write the plan."""
    job = json.loads(sys.stdin.read())
    folder = Path(job["folder"])
    known = [Plan.load(folder / f"known-{number}.json") for number in range(job["known"])]
    with errors_told():
        made = plan_here(
            Profile.load(folder / "profile.json"),
            job["budget_bytes"],
            known=known,
            progress=lambda text, share: tell({"progress": [text, share]}),
            **job["arguments"],
        )
        made.save(folder / "plan.json")
        tell({"done": True})


if __name__ == "__main__":
    main()
