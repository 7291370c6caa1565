"""What policies answer with: given decisions as a plan, and methods that find out by trying whether they succeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...ground.errors import InfeasibleBudget
from ...ir.plan import Decisions
from ..contract import PlanningRequest, PolicyOutcome
from .trials import Trial, Trials

BISECTIONS = 6  # halvings between a budget at which a policy fails and one at which it succeeds


def fixed_outcome(request: PlanningRequest, decisions: Decisions, policy: str) -> PolicyOutcome:
    """The outcome of given decisions.

    Raises:
        InfeasibleBudget: they do not fit; the minimum is that of these decisions.
    """
    trials = Trials(request)
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
