"""What policies share that let activations leave one after the other until the rest fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ...errors import InfeasibleBudget
from ...ir.plan import Choice, Decisions
from ...planner.candidates import Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import fixed_trial, leanest_trial, outcome_of
from ...planner.search.stall_rule import swaps_within_tier
from ...planner.search.trials import Trial, Trials

Leaving = list[tuple[int, Choice]]  # values in the order in which they leave, each with what happens to it
BISECTIONS = 6  # halvings between a budget at which a policy fails and one at which it succeeds


def fitted_outcome(request: PlanningRequest, leaving: Leaving, policy: str) -> PolicyOutcome:
    """Let the first few of `leaving` leave: as few as the budget asks for, found by bisection.

    Raises:
        InfeasibleBudget: not even all of them are enough; the minimum is that of all of them.
    """
    trials = Trials(request, Candidates(request.dataflow))
    trial = fewest_leaving(trials, leaving)
    if trial is None:
        trial = leanest_trial(trials, dict(leaving), policy)
    return outcome_of(trials, trial)


def fewest_leaving(trials: Trials, leaving: Leaving) -> Trial | None:
    """The plan in which the fewest leave, or None where it does not fit though all of them do."""
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
    """The decisions carried out, or None where they do not fit."""
    if not trials.might_fit(decisions):
        return None
    trial = trials.run(decisions)
    return trial if trial.fits else None


def all_swapped(trials: Trials, policy: str) -> Trial:
    """All swap, as far as the tier goes: where PoocH's methods begin.

    Raises:
        InfeasibleBudget: that does not fit, so they have no answer either.
    """
    return fixed_trial(trials, swaps_within_tier(trials), policy)


def with_smallest_budget(
    request: PlanningRequest, attempt: Callable[[PlanningRequest], PolicyOutcome | None], policy: str
) -> PolicyOutcome:
    """Try a method that may fail; where it does, find by bisection the smallest budget at which it succeeds.

    Args:
        request: what is asked.
        attempt: returns None if it fails; succeeds if memory is ample.
        policy: name of the method, for errors.

    Raises:
        InfeasibleBudget: it failed; the minimum was tried and succeeds.
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


def swaps_of(items: Iterable[Candidate]) -> Leaving:
    """Swaps in the order of the items; those that cannot be swapped stay."""
    return [(item.value, "swap") for item in items if item.can_wait]
