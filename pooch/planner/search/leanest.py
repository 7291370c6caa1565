"""Plans that are led by their fullest point: the one that needs the fewest bytes, and one that swaps little.

The smallest budget under which a plan is known is for the last resort and for `InfeasibleBudget`. A plan with few swaps
is for a tier that is slow beside the step: it lies between replays alone and swapping everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ground.errors import InfeasibleBudget
from ...ir.plan import Choice, Decisions
from ..candidates import Candidates
from .rules import between_checkpoints
from .trials import Trial, Trials

TOGGLES = 40  # single changes tried at the fullest point


@dataclass(frozen=True, slots=True)
class Leanest:
    """Decisions with the smallest budget found, and that budget (they fit when they are lowered for it)."""

    decisions: dict[int, Choice]
    budget_bytes: int


def leanest_plan(trials: Trials, enough_bytes: int = 0) -> Leanest:
    """Look for the decisions that need the fewest bytes, however long they take.

    Args:
        trials: evaluates plans.
        enough_bytes: the search ends with what needs no more than these.

    A swapped value is never present where a recomputed one is not, so "swap what can be swapped" is where the search
    starts; a host budget, or the bytes in flight, can make other choices better, so single changes follow. What it
    finds depends on the profile and the host budget only, so asking again for that many bytes always gives a plan.
    """
    starts = [Leanest(each, trials.least_budget(each)) for each in _starts(trials)]
    found: list[Leanest] = []
    # What needs least at first may be where single changes lead no further.
    for each in sorted(starts, key=_budget_bytes)[: 1 if trials.many else None]:
        found.append(_improve(trials, each, enough_bytes))
        if found[-1].budget_bytes <= enough_bytes:
            break
    return min(found, key=_budget_bytes)


def _starts(trials: Trials) -> Iterator[dict[int, Choice]]:
    yield _swap_within_host(trials, "keep")
    yield _swap_within_host(trials, "recompute")
    if not trials.candidates.mostly_swappable:
        yield from map(trials.complete, between_checkpoints(trials.candidates))


def _budget_bytes(leanest: Leanest) -> int:
    return leanest.budget_bytes


def try_leanest(trials: Trials) -> None:
    """The last resort: the plan that needs the fewest bytes, or the first on the way there that fits.

    Raises:
        InfeasibleBudget: even that one does not fit.
    """
    if try_starts(trials):
        return
    leanest, only = leanest_plan(trials, trials.request.budget_bytes), trials.candidates.only
    if leanest.budget_bytes > trials.request.budget_bytes:
        policy = f"ilp_{only}" if only is not None else "ilp"
        raise InfeasibleBudget(trials.request.budget_bytes, leanest.budget_bytes, policy)
    trials.run(leanest.decisions, leanest.budget_bytes)


def try_starts(trials: Trials) -> bool:
    """Whether any of what the search for the leanest plan starts with fits. The first that does is remembered."""
    return any(trials.fitting(decisions) is not None for decisions in _starts(trials))


def _swap_within_host(trials: Trials, otherwise: Choice) -> dict[int, Choice]:
    """Swap the largest values as far as the tier goes; the rest is kept or recomputed."""
    left = trials.request.host_budget_bytes
    chosen: list[int] = []
    for item in sorted(trials.candidates.items, key=lambda item: (-item.size_bytes, item.value)):
        if item.can_swap and (left is None or item.size_bytes <= left):
            chosen.append(item.value)
            left = None if left is None else left - item.size_bytes
    others = trials.candidates.all_of(otherwise)
    swapped = chosen if left is None else chosen[: _most_in_tier(trials, others, chosen)]
    return _swapping(others, swapped)


def _swapping(others: Decisions, swapped: list[int]) -> dict[int, Choice]:
    leaving: dict[int, Choice] = dict.fromkeys(swapped, "swap")
    return {**others, **leaving}


def _most_in_tier(trials: Trials, others: Decisions, chosen: list[int]) -> int:
    """How many of the chosen fit into the tier, whose layout may take more than their bytes."""
    low, high = 0, len(chosen)
    while low < high:
        middle = (low + high + 1) // 2
        if trials.fits_host(trials.request.evaluator.evaluate(_swapping(others, chosen[:middle]), 0)):
            low = middle
        else:
            high = middle - 1
    return low


def _improve(trials: Trials, leanest: Leanest, enough_bytes: int = 0) -> Leanest:
    """Change single choices of what takes room at the fullest point, as long as the need shrinks and is too high."""
    while leanest.budget_bytes > enough_bytes:
        better = _changed(trials, leanest)
        if better is None:
            break
        leanest = better
    return leanest


def _changed(trials: Trials, leanest: Leanest) -> Leanest | None:
    """The first of some single changes with which fewer bytes suffice, or None."""
    tried = 0
    for decisions in _changes(trials.candidates, leanest):
        if int(trials.candidates.least_points(decisions).max()) >= leanest.budget_bytes:
            continue
        evaluation = trials.request.evaluator.evaluate(decisions, leanest.budget_bytes - 1)
        if evaluation.timeline.peak_bytes < leanest.budget_bytes and trials.fits_host(evaluation):
            return Leanest(decisions, min(trials.least_budget(decisions), leanest.budget_bytes - 1))
        tried += 1
        if tried == TOGGLES:
            break
    return None


def _changes(candidates: Candidates, leanest: Leanest) -> Iterator[dict[int, Choice]]:
    """Decisions with one choice changed, the largest values first; none that need as much at the fullest point.

    Thousands of activations are common, and what each change needs takes a while to count.
    """
    least_bytes = candidates.least_points(leanest.decisions)
    fullest = int(least_bytes.argmax()) if least_bytes.max() >= leanest.budget_bytes else None
    for item in candidates.may_free(leanest.decisions, fullest):
        for choice in item.choices:
            if choice != leanest.decisions[item.value]:
                yield leanest.decisions | {item.value: choice}


def try_few_swaps(trials: Trials, evaluations: int) -> Trial | None:
    """Recompute what can be, and change what lies at the plan's fullest point until it fits, with few swaps.

    From a plan that swaps nearly everything, changing choices one by one seldom leads here.

    Args:
        trials: holds the plans, before and after.
        evaluations: at most.

    Returns:
        The plan, a place to start from, or None where none fits. It is remembered in `trials`.
    """
    last = trials.count + evaluations
    current = trials.run(trials.candidates.all_of("recompute"))
    while not current.fits:
        for decisions in _frees(trials, current):
            if trials.count >= last or trials.request.remaining_s() <= 0:
                return None
            trial = trials.run(decisions)
            if trial.evaluation.timeline.peak_bytes < current.evaluation.timeline.peak_bytes:
                current = trial
                break
        else:
            return None
    return current


def _frees(trials: Trials, trial: Trial) -> Iterator[dict[int, Choice]]:
    """Decisions with one choice changed that may free the fullest point: swaps last, the shortest copies first; before
    them the largest values first.
    """
    points = trial.evaluation.timeline.point_bytes
    point = max(range(len(points)), key=points.__getitem__)
    items = trials.candidates.may_free(trial.decisions, point)
    changes = [(item, choice) for item in items for choice in item.choices if choice != trial.decisions[item.value]]
    for item, choice in sorted(changes, key=lambda change: change[0].copy_ms if change[1] == "swap" else -1.0):
        decisions = {**trial.decisions, item.value: choice}
        if int(trials.candidates.least_points(decisions).max()) < trial.evaluation.timeline.peak_bytes:
            yield decisions
