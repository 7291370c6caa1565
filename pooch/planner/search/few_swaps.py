"""A plan that swaps little, for a tier that is slow beside the step: between replays alone and swapping everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ...ir.plan import Choice
from .trials import Trial, Trials


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
        for decisions in _changes(trials, current):
            if trials.count >= last or trials.request.remaining_s() <= 0:
                return None
            trial = trials.run(decisions)
            if trial.evaluation.timeline.peak_bytes < current.evaluation.timeline.peak_bytes:
                current = trial
                break
        else:
            return None
    return current


def _changes(trials: Trials, trial: Trial) -> Iterator[dict[int, Choice]]:
    """Decisions with one choice changed that may free the fullest point: those that swap come last, the shortest copies
    first; of the others the largest values come first.
    """
    points = trial.evaluation.timeline.point_bytes
    point = max(range(len(points)), key=points.__getitem__)
    items = trials.candidates.may_free(trial.decisions, point)
    kept_or_replayed = ((item, choice) for item in items for choice in item.choices if choice != "swap")
    swapped = ((item, "swap") for item in sorted(items, key=lambda item: (item.copy_ms, item.value)) if item.can_swap)
    for item, choice in chain(kept_or_replayed, swapped):
        decisions = {**trial.decisions, item.value: choice}
        least_bytes = int(trials.candidates.least_points(decisions).max())
        if choice != trial.decisions[item.value] and least_bytes < trial.evaluation.timeline.peak_bytes:
            yield decisions
