"""Plain training: everything stays on the device."""

from __future__ import annotations

from ..contract import PlanningRequest, PolicyOutcome
from ..search.fixed import fixed_outcome


def keep_all(request: PlanningRequest) -> PolicyOutcome:
    """Keep every activation.

    Raises:
        InfeasibleBudget: the in-core peak is over the budget.
    """
    return fixed_outcome(request, {}, "keep_all")
