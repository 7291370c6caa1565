"""Many changes at a time: what a local search does one by one, for the little effort of a fast plan.

A batch that makes the plan better is taken; one that does not is split in two, and its halves are tried later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...ir.plan import Choice
from ..candidates import Candidate
from .trials import Trial, Trials

BATCHES = 4  # that the changes of one kind begin as


def improve_in_batches(trials: Trials, evaluations: int) -> None:
    """Try to keep more, and to change how activations leave, on the best plan.

    What fits is remembered in `trials`.

    Args:
        trials: holds the plans, before and after.
        evaluations: at most, for each of the three kinds of changes.
    """
    for change in (_kept, _recomputed, _swapped):
        if trials.best is not None:
            _climb(trials, trials.best, change(trials, trials.best), evaluations)


def _climb(trials: Trials, current: Trial, changes: Sequence[tuple[int, Choice]], evaluations: int) -> None:
    last = trials.count + evaluations
    size = -(-len(changes) // BATCHES)
    waiting = deque(changes[begin : begin + size] for begin in range(0, len(changes), max(1, size)))
    while waiting and trials.count < last and trials.request.remaining_s() > 0:
        batch = waiting.popleft()
        decisions = {**current.decisions, **dict(batch)}
        trial = trials.run(decisions) if trials.is_promising(decisions) else None
        if trial is not None and trial.fits and trial.rank < current.rank:
            current = trial
        elif len(batch) > 1:
            half = len(batch) // 2
            waiting += (batch[:half], batch[half:])


def _kept(trials: Trials, best: Trial) -> list[tuple[int, Choice]]:
    """What leaves and could stay, by a sum of bytes that no schedule goes below; the dearest per byte first."""
    room = trials.request.budget_bytes - trials.candidates.least_points(best.decisions)
    left = [item for item in trials.candidates.items if best.decisions[item.value] != "keep"]
    found: list[tuple[int, Choice]] = []
    for item in sorted(left, key=lambda item: (-item.cost_per_byte, item.value)):
        away = trials.candidates.away_points(item)
        others_bytes = trials.candidates.others * item.memory_bytes * trials.candidates.others_hold(item)
        fits = room.min(initial=others_bytes) >= others_bytes
        if fits and room[away].min(initial=item.memory_bytes + others_bytes) >= item.memory_bytes + others_bytes:
            room -= others_bytes
            room[away] -= item.memory_bytes
            found.append((item.value, "keep"))
    return found


def _recomputed(trials: Trials, best: Trial) -> list[tuple[int, Choice]]:
    """What is swapped and could be recomputed; what saves the most time on the link first."""

    def saved_ms(item: Candidate) -> float:
        return item.copy_ms - item.replay_ms

    swapped = (item for item in trials.candidates.items if best.decisions[item.value] == "swap")
    items = sorted((i for i in swapped if i.can_recompute), key=lambda item: (-saved_ms(item), item.value))
    return [(item.value, "recompute") for item in items]


def _swapped(trials: Trials, best: Trial) -> list[tuple[int, Choice]]:
    """What is recomputed and could be swapped; what takes the link for the least time per replay first."""
    recomputed = (item for item in trials.candidates.items if best.decisions[item.value] == "recompute")
    items = sorted((i for i in recomputed if i.can_swap), key=lambda i: (i.copy_ms - i.replay_ms, i.value))
    return [(item.value, "swap") for item in items]
