"""What is known about each kind of step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..executor.table import ActionTable
from ..ir import Plan, Profile
from ..units import format_bytes
from ..wording import slower_than
from .signature import StepKey
from .summary import Decision, PlannedShape

MOST_RECORDS = 16  # of a family: all of them are sent along when another shape is derived
DIFFERED = "a replay of it gave other bits in training"


@dataclass
class Known:
    """What is known about one kind of step.

    Attributes:
        profile: Its profile, or None.
        origin: "recorded", "derived" from other shapes, "cached", or "unknown".
        calls: Number of calls of governed modules in the recorded step; 0 if it was derived.
        plan: Its plan, or None.
        table: The plan, indexed.
        minimum_bytes: The smallest budget for which there is a plan, if one was refused.
        is_pending: Whether an answer is on its way.
        is_improved: Whether its plan was or is being searched for longer.
        is_outdated: Whether its plan has replays that gave other bits, and is to be made again.
        cannot_derive: Whether its profile cannot be derived from other shapes.
        never_recorded: Whether it cannot be recorded either.
        failed_records: Number of times that recording it failed.
        steps: Number of steps.
        left_plan: Number of steps in a row that left the plan.
        reason: Why it is not planned, for the reader of the summary.
        decision: How the last step was run.
    """

    profile: Profile | None = None
    origin: str = "unknown"
    calls: int = 0
    plan: Plan | None = None
    table: ActionTable | None = None
    minimum_bytes: int = 0
    is_pending: bool = False
    is_improved: bool = False
    is_outdated: bool = False
    cannot_derive: bool = False
    never_recorded: bool = False
    failed_records: int = 0
    steps: int = 0
    left_plan: int = 0
    reason: str = ""
    decision: Decision = "online"

    def shape(self, key: StepKey) -> PlannedShape:
        """Return it as the summary shows it."""
        return PlannedShape(
            key.text,
            self.origin,
            "online" if self.decision == "record" else self.decision,
            self.steps,
            self.profile.peak_bytes if self.profile else None,
            self.plan.predicted_peak_bytes if self.plan else None,
            _slowdown(self.plan) if self.plan else None,
            self.reason,
        )


@dataclass
class Family:
    """Steps that differ in sizes alone.

    Attributes:
        recording: Number of shapes that were or are being recorded.
        recorded: The recorded ones that were recorded last.
        copied_steps: Number of online steps that are still to come in which nothing is replayed.
        shapes: Number of its kinds of steps that are remembered.
    """

    recording: int = 0
    copied_steps: int = 0
    shapes: int = 0
    recorded: dict[tuple[int, ...], Profile] = field(default_factory=dict)

    def add(self, sizes: tuple[int, ...], profile: Profile) -> None:
        """Take the profile of a step that was recorded."""
        self.recorded.pop(sizes, None)
        self.recorded[sizes] = profile
        if len(self.recorded) > MOST_RECORDS:
            self.recorded.pop(next(iter(self.recorded)))

    def has_larger_that_fits(self, sizes: tuple[int, ...], start_bytes: int, target_bytes: int) -> bool:
        """Whether a recorded step that is larger in every size would fit."""
        return any(
            profile.peak_bytes - profile.persistent_bytes + start_bytes <= target_bytes
            for others, profile in self.recorded.items()
            if all(mine <= other for mine, other in zip(sizes, others, strict=True))
        )


def without_replays(profile: Profile, values: Collection[int]) -> Profile:
    """Return a profile in which the ops that make some values cannot be replayed."""
    producers = {profile.values[value].producer for value in values}
    ops = tuple(
        replace(op, refusal=DIFFERED) if slot in producers and op.refusal is None else op
        for slot, op in enumerate(profile.ops)
    )
    return replace(profile, ops=ops)


def described(plan: Plan) -> str:
    """Return a plan in a few words."""
    peaks = f"{format_bytes(plan.predicted_peak_bytes)} instead of {format_bytes(plan.in_core_peak_bytes)}"
    return f"{peaks}, predicted {slower_than(_slowdown(plan), 'without Pooch')}"


def _slowdown(plan: Plan) -> float:
    return plan.predicted_step_ms / plan.in_core_step_ms
