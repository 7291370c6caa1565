"""The steps that were met, and how each kind of them is run: in-core, under its plan, or online."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from ..api.options import PlanOptions
from ..executor.table import ActionTable
from ..ir import Link, Plan, Profile
from ..units import format_bytes
from .signature import StepKey
from .summary import PlannedShape
from .worker import Planned, PlanningWorker

Decision = Literal["in-core", "plan", "online", "record"]

MOST_RECORDED = 3  # steps of one family that are recorded
MOST_FAILURES = 3  # steps in a row that left a plan, after which the step is recorded again
PLANNED_SHARE = 0.985  # of the budget, as a recorded step is not repeated exactly
_NOT_MEASURED = Link("not measured yet", 0.01, 0.01, 1e6, 1e6)


@dataclass
class Known:
    """What is known about one kind of step.

    Attributes:
        profile: Its profile, or None.
        origin: Where that comes from.
        plan: Its plan, or None.
        table: The plan, indexed.
        target_bytes: The budget that the plan was made for, or is being made for.
        minimum_bytes: The smallest budget for which there is a plan, if the last one was refused.
        is_pending: Whether a plan is being made.
        steps: Number of steps.
        left_plan: Number of steps in a row that left the plan.
        reason: For the reader of the summary.
        decision: How the last step was run.
    """

    profile: Profile | None = None
    origin: str = "unknown"
    plan: Plan | None = None
    table: ActionTable | None = None
    target_bytes: int = 0
    minimum_bytes: int = 0
    is_pending: bool = False
    steps: int = 0
    left_plan: int = 0
    reason: str = ""
    decision: Decision = "online"


@dataclass
class _Family:
    recorded: int = 0
    failures: int = 0
    keys: list[StepKey] = field(default_factory=list)


class Library:
    """Plans by the key of a step. New plans arrive from a worker, and are taken when a step begins.

    Args:
        options: How to plan.
        tell: Called with one line for each new plan.
    """

    def __init__(self, options: PlanOptions, tell: Callable[[str], None]) -> None:
        self._options, self._tell = options, tell
        self._known: dict[StepKey, Known] = {}
        self._families: dict[tuple[object, ...], _Family] = {}
        self._worker = PlanningWorker()
        self._answers: list[tuple[Known, StepKey, Planned]] = []
        self._lock = threading.Lock()
        self.events: list[str] = []

    def choose(self, key: StepKey, start_bytes: int, budget_bytes: int | None) -> tuple[Decision, Known]:
        """Decide how to run a step.

        Args:
            key: Its key.
            start_bytes: Bytes that are live before it.
            budget_bytes: The budget, or None if it is not known yet.
        """
        self._take_answers()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known()
            self._families.setdefault(key.family, _Family()).keys.append(key)
        known.steps += 1
        known.decision = self._decision(key, known, start_bytes, budget_bytes)
        return known.decision, known

    def _decision(self, key: StepKey, known: Known, start_bytes: int, budget_bytes: int | None) -> Decision:
        family = self._families[key.family]
        profile = known.profile
        if profile is None or budget_bytes is None or known.left_plan >= MOST_FAILURES:
            if family.recorded >= MOST_RECORDED:
                return "online"
            family.recorded += 1
            known.left_plan = 0
            return "record"
        more_bytes = start_bytes - profile.persistent_bytes
        if profile.peak_bytes + more_bytes <= PLANNED_SHARE * budget_bytes:
            known.reason = ""
            return "in-core"
        target_bytes = int(PLANNED_SHARE * budget_bytes) - more_bytes
        if known.plan is not None and known.plan.predicted_peak_bytes <= target_bytes:
            return "plan"
        if not known.is_pending and known.minimum_bytes <= target_bytes:
            self._request(key, known, target_bytes)
        return "online"

    def _request(self, key: StepKey, known: Known, target_bytes: int) -> None:
        assert known.profile is not None
        known.is_pending, known.target_bytes = True, target_bytes

        def done(planned: Planned) -> None:
            with self._lock:
                self._answers.append((known, key, planned))

        self._worker.plan(known.profile, target_bytes, self._options, done)

    def _take_answers(self) -> None:
        if not self._answers:
            return
        with self._lock:
            answers, self._answers = self._answers, []
        for known, key, planned in answers:
            known.is_pending = False
            known.profile = planned.profile
            if planned.plan is None:
                known.minimum_bytes = planned.minimum_bytes or 2**62
                known.reason = planned.refusal
                self._say(f"no plan for steps of {key.text}, so they run online: {planned.refusal}")
                continue
            plan = planned.plan
            why = "planned" if known.plan is None else "planned again"
            known.plan, known.table = plan, ActionTable.of(plan)
            slowdown = plan.predicted_step_ms / plan.in_core_step_ms
            self._say(
                f"{why} for steps of {key.text}: {format_bytes(plan.predicted_peak_bytes)} instead of "
                f"{format_bytes(plan.in_core_peak_bytes)}, {slowdown:.2f} of the plain time"
            )

    def _say(self, text: str) -> None:
        self.events.append(text)
        self._tell(text)

    def recorded(self, known: Known, profile: Profile) -> None:
        """Take the profile of a step that was recorded."""
        known.profile, known.origin = profile, "recorded"
        known.plan = known.table = None
        known.minimum_bytes = 0

    def not_recorded(self, key: StepKey) -> None:
        """Note that a step could not be recorded after all."""
        self._families[key.family].recorded -= 1

    def left_plan(self, known: Known) -> None:
        """Note that a step left its plan."""
        known.left_plan += 1

    def kept_to_plan(self, known: Known) -> None:
        """Note that a step followed its plan."""
        known.left_plan = 0

    @property
    def is_planning(self) -> bool:
        """Whether any plan is being made."""
        return any(known.is_pending for known in self._known.values()) and not self._answers

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """The plans that are in use."""
        self._take_answers()
        return {key: known.plan for key, known in self._known.items() if known.plan is not None}

    def shapes(self) -> tuple[PlannedShape, ...]:
        """What is known, for the summary; the most frequent steps first."""
        rows = sorted(self._known.items(), key=lambda item: -item[1].steps)
        return tuple(
            PlannedShape(
                key.text,
                known.origin,
                "online" if known.decision == "record" else known.decision,
                known.steps,
                known.profile.peak_bytes if known.profile else None,
                known.plan.predicted_peak_bytes if known.plan else None,
                known.plan.predicted_step_ms / known.plan.in_core_step_ms if known.plan else None,
                known.reason,
            )
            for key, known in rows
        )

    def close(self) -> None:
        """Plan no longer."""
        self._worker.stop()


def without_link(profile: Profile) -> Profile:
    """Return a profile whose link is measured when it is planned."""
    return replace(profile, link=_NOT_MEASURED)


NOT_MEASURED = _NOT_MEASURED
