"""Swap whatever can be: a baseline of the PoocH paper (Ito et al. 2019), copies as early as memory permits."""

from __future__ import annotations

from pooch.ir.plan import Choice
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.policies.fixed import fixed_outcome


def swap_all(request: PlanningRequest) -> PolicyOutcome:
    """Swap every activation that is away for some time, in forward order as far as the tier goes; keep the others.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    candidates = Candidates(request.dataflow)
    left = request.host_budget_bytes
    decisions: dict[int, Choice] = {}
    for item in candidates.items:
        if item.can_swap and (left is None or item.size_bytes <= left):
            decisions[item.value] = "swap"
            left = None if left is None else left - item.size_bytes
    kept = sum(item.can_swap for item in candidates.items) - len(decisions)
    notes = (f"{kept} activations are kept because the host budget is used up",) if kept else ()
    return fixed_outcome(request, decisions, "swap_all", notes)
