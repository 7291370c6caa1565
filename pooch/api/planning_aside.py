"""Planning in a child process, which returns all the memory that it took when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from ..ir import Decisions, Plan, Profile
from ..progress import PlanningProgress, silent
from .children import run_child
from .options import PlanOptions


def plan_in_child(
    profile: Profile,
    budget_bytes: int,
    options: PlanOptions,
    known: Sequence[Plan],
    start: Decisions | None,
    progress: PlanningProgress | None,
) -> Plan | None:
    """Plan in a child process; the arguments are those of `plan_here`. None where the process ended without a plan."""
    with TemporaryDirectory(prefix="pooch-") as name:
        folder = Path(name)
        profile.save(folder / "profile.json")
        for number, each in enumerate(known):
            each.save(folder / f"known-{number}.json")
        job = {
            "folder": name,
            "budget_bytes": budget_bytes,
            "known": len(known),
            "start": None if start is None else list(start.items()),
            "options": asdict(options),
        }
        done = run_child(f"{__package__}.planning_child", job, progress or silent)
        return None if done is None else Plan.load(folder / "plan.json")
