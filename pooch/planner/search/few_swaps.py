"""A plan that swaps little, for a tier that is slow beside the step: between replays alone and swapping everything."""

from __future__ import annotations

from collections.abc import Iterator

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
