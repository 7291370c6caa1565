"""Shared by the methods: how a choice becomes an outcome, and how values leave one after another until the rest fits.

Swaps alone never raise the peak, so the fewest that fit are found by bisection. Replays can raise it: whether a list of
swaps and replays fits says nothing about a longer or a shorter list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from ...ir.plan import Choice
from ...planner.candidates import NEVER, Candidate
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of, with_smallest_budget
from ...planner.search.trials import Trial, Trials

Leaving = list[tuple[int, Choice]]  # values in the order in which they leave, each with its choice


def chosen(request: PlanningRequest, choose: Callable[[Trials], Trial]) -> PolicyOutcome:
    """Return the outcome of a method that finds a plan, or raises `InfeasibleBudget` itself."""
    trials = Trials(request)
    return outcome_of(trials, choose(trials))


def attempted(request: PlanningRequest, attempt: Callable[[Trials], Trial | None], policy: str) -> PolicyOutcome:
    """Return the outcome of a method that only finds out whether it succeeds by trying.

    Args:
        request: what to plan.
        attempt: the method. It fails with None or a plan that does not fit, and must succeed with ample memory.
        policy: name of the method, for errors.

    Raises:
        InfeasibleBudget: the method failed; gives a budget at which it was seen to succeed.
    """

    def outcome(asked: PlanningRequest) -> PolicyOutcome | None:
        trials = Trials(asked)
        trial = attempt(trials)
        return outcome_of(trials, trial) if trial is not None and trial.fits else None

    return with_smallest_budget(request, outcome, policy)


def fewest_leaving(trials: Trials, leaving: Leaving) -> Trial | None:
    """Return the plan in which the fewest values leave, or None if it does not fit even when all leave."""
    count = fewest_count(trials, leaving)
    return None if count is None else trials.fitting(dict(leaving[:count]))


def fewest_count(trials: Trials, leaving: Leaving) -> int | None:
    """Return how many of the first values have to leave, or None if it does not fit even when all leave."""
    if trials.fitting(dict(leaving)) is None:
        return None
    return fewest_that(lambda count: trials.fitting(dict(leaving[:count])) is not None, len(leaving))


def fewest_that(fit: Callable[[int], bool], most: int) -> int:
    """Return the smallest number that fits, by bisection; the largest is not tried, and taken to fit."""
    return bisect_left(range(most), True, key=fit)


def first_fitting(trials: Trials, leaving: Leaving) -> Trial | None:
    """Let one value after another leave until the plan fits; None if it never does.

    Unlike `fewest_leaving`, this does not expect that it fits when all leave, so replays may be among them.
    """
    prefixes = (dict(leaving[:count]) for count in range(len(leaving) + 1))
    return next((trial for decisions in prefixes if (trial := trials.fitting(decisions)) is not None), None)


def swaps_of(items: Iterable[Candidate]) -> Leaving:
    """Swap the items in their order; those that cannot be swapped stay."""
    return [(item.value, "swap") for item in items if item.can_wait]


def end_slot(item: Candidate) -> int:
    """Return the slot of the first use in the backward pass or, without one, that in which autograd lets go."""
    return item.death if item.need == NEVER else item.need
