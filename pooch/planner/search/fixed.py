"""Outcomes of policies that decide without regard to the budget: their decisions fit, or they do not."""

from __future__ import annotations

from ...errors import InfeasibleBudget
from ...ir.plan import Decisions
from ..candidates import Candidates
from ..contract import PlanningRequest, PolicyOutcome
from .trials import Trials


def fixed_outcome(request: PlanningRequest, decisions: Decisions, policy: str) -> PolicyOutcome:
    """The outcome of given decisions.

    Raises:
        InfeasibleBudget: they do not fit; the minimum is that of these decisions.
    """
    candidates = Candidates(request.dataflow)
    trials = Trials(request, candidates)
    trial = trials.run(decisions)
    if not trial.fits:
        least_bytes = trials.least_budget(decisions)
        trial = trials.run(decisions, least_bytes)
        if not trial.fits:
            raise InfeasibleBudget(request.budget_bytes, least_bytes, policy)
    return PolicyOutcome(trial.decisions, trial.evaluation, candidates.compute_ms)
