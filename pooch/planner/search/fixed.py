"""Given decisions as a plan: under the budget or, if they do not fit, as they fit at their very least."""

from __future__ import annotations

from ...errors import InfeasibleBudget
from ...ir.plan import Decisions
from ..candidates import Candidates
from ..contract import PlanningRequest, PolicyOutcome
from .trials import Trial, Trials


def fixed_outcome(request: PlanningRequest, decisions: Decisions, policy: str) -> PolicyOutcome:
    """The outcome of given decisions.

    Raises:
        InfeasibleBudget: they do not fit; the minimum is that of these decisions.
    """
    trials = Trials(request, Candidates(request.dataflow))
    return outcome_of(trials, fixed_trial(trials, decisions, policy))


def fixed_trial(trials: Trials, decisions: Decisions, policy: str) -> Trial:
    """Given decisions under the request's budget or, if they do not fit, as they fit at their very least.

    Raises:
        InfeasibleBudget: even that is too much; the minimum is that of these decisions.
    """
    trial = trials.run(decisions)
    return trial if trial.fits else leanest_trial(trials, decisions, policy)


def leanest_trial(trials: Trials, decisions: Decisions, policy: str) -> Trial:
    """Given decisions as they fit at their very least.

    Raises:
        InfeasibleBudget: that is too much; the minimum is that of these decisions.
    """
    least_bytes = trials.least_budget(decisions)
    trial = trials.run(decisions, least_bytes)
    if not trial.fits:
        raise InfeasibleBudget(trials.request.budget_bytes, least_bytes, policy)
    return trial


def outcome_of(trials: Trials, trial: Trial, notes: tuple[str, ...] = ()) -> PolicyOutcome:
    """A plan without a bound of its own."""
    return PolicyOutcome(trial.decisions, trial.evaluation, trials.candidates.compute_ms, notes=notes)
