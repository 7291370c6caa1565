"""Shared by the policies that let activations leave one after another until the rest fits."""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.plan import Choice, Decisions
from ...planner.candidates import Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import fixed_trial, leanest_trial, outcome_of
from ...planner.search.stall_rule import swaps_within_tier
from ...planner.search.trials import Trial, Trials

Leaving = list[tuple[int, Choice]]  # values in the order in which they leave, each with its choice


def fitted_outcome(request: PlanningRequest, leaving: Leaving, policy: str) -> PolicyOutcome:
    """Let only as many of the first values in `leaving` leave as the budget requires, found by bisection.

    Args:
        request: what to plan.
        leaving: values in the order in which they leave.
        policy: name of the method, for errors.

    Raises:
        InfeasibleBudget: the step does not fit even if all leave; gives the smallest budget for that.
    """
    trials = Trials(request, Candidates(request.dataflow))
    trial = fewest_leaving(trials, leaving)
    if trial is None:
        trial = leanest_trial(trials, dict(leaving), policy)
    return outcome_of(trials, trial)


def fewest_leaving(trials: Trials, leaving: Leaving) -> Trial | None:
    """Return the plan in which the fewest values leave, or None if it does not fit even when all leave."""
    found = _fitting(trials, dict(leaving))
    low, high = 0, len(leaving)
    while found is not None and low < high:
        middle = (low + high) // 2
        trial = _fitting(trials, dict(leaving[:middle]))
        if trial is None:
            low = middle + 1
        else:
            found, high = trial, middle
    return found


def _fitting(trials: Trials, decisions: Decisions) -> Trial | None:
    """Return the trial of the decisions, or None if they do not fit."""
    if not trials.might_fit(decisions):
        return None
    trial = trials.run(decisions)
    return trial if trial.fits else None


def all_swapped(trials: Trials, policy: str) -> Trial:
    """Swap everything for which the tier has room: the start of PoocH's methods.

    Raises:
        InfeasibleBudget: that does not fit, so these methods have no plan.
    """
    return fixed_trial(trials, swaps_within_tier(trials), policy)


def swaps_of(items: Iterable[Candidate]) -> Leaving:
    """Swap the items in their order; those that cannot be swapped stay."""
    return [(item.value, "swap") for item in items if item.can_wait]
