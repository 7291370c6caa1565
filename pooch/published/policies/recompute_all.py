"""Recompute whatever can be: a baseline of the PoocH paper (Ito et al. 2019), at the level of single values."""

from __future__ import annotations

from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import fixed_outcome


def recompute_all(request: PlanningRequest) -> PolicyOutcome:
    """Recompute every activation that a replay can make again; keep the others.

    The first replay of the backward pass then goes back as far as the first value that could not be dropped, and
    what it makes on the way stays: this is slow and need not be lean.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return fixed_outcome(request, Candidates(request.dataflow).all_of("recompute"), "recompute_all")
