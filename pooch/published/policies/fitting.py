"""Shared by the policies that let activations leave one after another until the rest fits.

Swaps alone never raise the peak, so the fewest that fit are found by bisection. Replays can raise it: whether a list of
swaps and replays fits says nothing about a longer or a shorter list.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.plan import Choice
from ...planner.candidates import Candidate
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import leanest_trial, outcome_of
from ...planner.search.trials import Trial, Trials

Leaving = list[tuple[int, Choice]]  # values in the order in which they leave, each with its choice


def fitted_outcome(request: PlanningRequest, leaving: Leaving, policy: str) -> PolicyOutcome:
    """Let only as many of the first values in `leaving`, which are swapped, leave as the budget requires.

    Args:
        request: what to plan.
        leaving: values in the order in which they leave.
        policy: name of the method, for errors.

    Raises:
        InfeasibleBudget: the step does not fit even if all leave; gives the smallest budget for that.
    """
    trials = Trials(request)
    trial = fewest_leaving(trials, leaving)
    if trial is None:
        trial = leanest_trial(trials, dict(leaving), policy)
    return outcome_of(trials, trial)


def fewest_leaving(trials: Trials, leaving: Leaving) -> Trial | None:
    """Return the plan in which the fewest values leave, or None if it does not fit even when all leave."""
    count = fewest_count(trials, leaving)
    return None if count is None else trials.fitting(dict(leaving[:count]))


def fewest_count(trials: Trials, leaving: Leaving) -> int | None:
    """Return how many of the first values have to leave, or None if it does not fit even when all leave."""
    if trials.fitting(dict(leaving)) is None:
        return None
    low, high = 0, len(leaving)
    while low < high:
        middle = (low + high) // 2
        if trials.fitting(dict(leaving[:middle])) is None:
            low = middle + 1
        else:
            high = middle
    return high


def first_fitting(trials: Trials, leaving: Leaving) -> Trial | None:
    """Let one value after another leave until the plan fits; None if it never does.

    Unlike `fewest_leaving`, this does not expect that it fits when all leave, so replays may be among them.
    """
    prefixes = (dict(leaving[:count]) for count in range(len(leaving) + 1))
    return next((trial for decisions in prefixes if (trial := trials.fitting(decisions)) is not None), None)


def swaps_of(items: Iterable[Candidate]) -> Leaving:
    """Swap the items in their order; those that cannot be swapped stay."""
    return [(item.value, "swap") for item in items if item.can_wait]
