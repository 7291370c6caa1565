"""Planning in a process of its own, which gives all the memory that this took back by ending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pooch.api.children import run_child
from pooch.ir import Plan, Profile


def plan_in_child(
    profile: Profile, budget_bytes: int, known: Sequence[Plan], arguments: Mapping[str, Any], progress: Any
) -> Plan | None:
    """Plan in a process of its own.

    Args:
        profile: the measured step.
        budget_bytes: to plan for.
        known: plans made before.
        arguments: the others of `plan`, as plain data.
        progress: called with what is being done and the share that is done; None: nobody is told.

    Returns:
        The plan; None where the process ended without one.
    """
    with TemporaryDirectory(prefix="pooch-") as name:
        folder = Path(name)
        profile.save(folder / "profile.json")
        for number, each in enumerate(known):
            each.save(folder / f"known-{number}.json")
        job = {"folder": name, "budget_bytes": budget_bytes, "known": len(known), "arguments": dict(arguments)}
        done = run_child("pooch.api.planning_child", job, progress or _silent)
        return None if done is None else Plan.load(folder / "plan.json")


def _silent(text: str, share: float) -> None:
    """Nobody is told."""
