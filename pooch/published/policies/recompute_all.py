"""Recompute everything that can be: a baseline of the PoocH paper (Ito et al. 2019), at the level of single values."""

from __future__ import annotations

from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import fixed_outcome


def recompute_all(request: PlanningRequest) -> PolicyOutcome:
    """Recompute every activation that can be recomputed, and keep the others.

    The first replay of the backward pass then begins at the first value that could not be dropped, and holds everything
    that it makes on the way: this is slow, and may need much memory.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return fixed_outcome(request, Candidates(request.dataflow).all_of("recompute"), "recompute_all")
