"""The step that ended last, as `Auto.status()` tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..executor.status import Mode, Status
from .summary import Decision


@dataclass(frozen=True, slots=True)
class LastStep:
    """The step that ended last.

    Attributes:
        mode: How it ran.
        peak_bytes: Its measured peak.
        slowdown: Its predicted time over the plain one, or None if it is not known.
    """

    mode: Mode = "none"
    peak_bytes: int | None = None
    slowdown: float | None = None

    @classmethod
    def of(cls, decision: Decision, left_plan: bool, peak_bytes: int, slowdown: float | None) -> LastStep:
        """Return what is told of a step.

        Args:
            decision: How it began.
            left_plan: Whether it left its plan, and so went on under the online policy.
            peak_bytes: Its measured peak.
            slowdown: The predicted time on the plan for its kind of step over the plain one, if there is one.
        """
        match decision:
            case "in-core":
                return cls("in-core", peak_bytes, 1.0)
            case "record":
                return cls("recorded", peak_bytes)
            case "plan" if not left_plan:
                return cls("plan", peak_bytes, slowdown)
        return cls("online", peak_bytes)

    def status(self, steps: int, budget_bytes: int | None) -> Status:
        """Return it with the number of steps so far and the budget."""
        return Status.of(steps, self.mode, self.peak_bytes, budget_bytes, self.slowdown)
