"""Methods that only find out whether they succeed by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import InfeasibleBudget
from ..contract import PlanningRequest, PolicyOutcome

BISECTIONS = 6  # halvings between a budget at which a policy fails and one at which it succeeds


def with_smallest_budget(
    request: PlanningRequest, attempt: Callable[[PlanningRequest], PolicyOutcome | None], policy: str
) -> PolicyOutcome:
    """Try a method that may fail. If it does, find the smallest budget at which it succeeds, by bisection.

    Args:
        request: what to plan.
        attempt: the method. It returns None if it fails, and must succeed with ample memory.
        policy: name of the method, for errors.

    Raises:
        InfeasibleBudget: the method failed; gives a budget at which it was seen to succeed.
    """
    outcome = attempt(request)
    if outcome is not None:
        return outcome
    low, high = request.budget_bytes, max(request.dataflow.profile.peak_bytes, request.budget_bytes + 1)
    while attempt(_under(request, high)) is None:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if middle == low:
            break
        if attempt(_under(request, middle)) is None:
            low = middle
        else:
            high = middle
    raise InfeasibleBudget(request.budget_bytes, high, policy)


def _under(request: PlanningRequest, budget_bytes: int) -> PlanningRequest:
    return replace(request, budget_bytes=budget_bytes, progress=None)
