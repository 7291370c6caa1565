"""Local search on the evaluator: the program models a schedule only roughly, so try changes on the real thing.

A full search tries them one by one. For the little effort of a fast plan there are batches: one that makes the plan
better is taken; one that does not is split in two, and its halves are tried later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product

from ...ir.plan import Choice
from ..candidates import Candidate
from .trials import Trial, Trials

SMALL = 8  # up to this many activations all changes of up to three decisions are tried
PARTNERS = 12  # on each side of an exchange in larger problems
MOST_LOOKED_AT = 400_000  # activations times changes looked at in one pass
LONG_EFFORT = 150_000  # activations times evaluations of a local search at most
BATCHES = 4  # that the changes of one kind begin as
CLOSE = 0.0005  # relative distance to the target at which nothing is left to improve
Change = dict[int, Choice]


@dataclass(frozen=True, slots=True)
class Effort:
    """How far to go.

    Attributes:
        trials: evaluations in all (the same on every machine).
        passes: over all changes, from each start.
        starts: how many of the best plans to start from.
        leave_share: share of the time limit to leave to others.
    """

    trials: int
    passes: int
    starts: int
    leave_share: float = 0.0


def improve(trials: Trials, effort: Effort, target_ms: float, starts: Sequence[Trial] | None = None) -> None:
    """Change good plans bit by bit as long as that makes them faster: the best first, then others to leave its valley.

    `target_ms` is a lower bound: a plan this fast needs no improvement. Without `starts`, it begins from the best plans
    so far.
    """
    most = effort.trials
    if trials.many:  # fewer evaluations where each takes longer
        most = min(most, max(4, LONG_EFFORT // len(trials.candidates.items)))
    last = trials.count + most
    for start in trials.elite[: 2 if trials.many else effort.starts] if starts is None else starts:
        _climb(trials, start, effort, _Stop(trials, last, effort.leave_share, target_ms))


@dataclass(frozen=True, slots=True)
class _Stop:
    """When climbing ends."""

    trials: Trials
    last: int
    leave_share: float
    target_ms: float

    @property
    def is_due(self) -> bool:
        """The best is as good as can be, or the effort is spent."""
        is_best = self.trials.best_ms <= self.target_ms * (1 + CLOSE)
        return is_best or self.trials.count >= self.last or not self.trials.request.has_left(self.leave_share)


def _climb(trials: Trials, start: Trial, effort: Effort, stop: _Stop) -> None:
    """Take every change that makes the plan better, until a whole pass changes nothing."""
    current = start
    for _ in range(effort.passes):
        before = current
        most = max(16, MOST_LOOKED_AT // max(1, len(trials.candidates.items)))
        for change in islice(_changes(trials, before), most):
            if stop.is_due:
                return
            decisions = current.decisions | change
            if trials.is_promising(decisions):
                trial = trials.run(decisions)
                current = trial if trial.fits and trial.rank < current.rank else current
        if current is before:
            return


def _changes(trials: Trials, best: Trial) -> Iterator[Change]:
    """Changes to try on the best plan, the most promising first."""
    items, chosen = trials.candidates.items, best.decisions
    if len(items) <= SMALL:
        yield from _all_changes(items)
        return
    left = sorted((item for item in items if chosen[item.value] != "keep"), key=lambda item: -_cost_ms(item, best))
    kept = sorted((i for i in items if i.can_leave and chosen[i.value] == "keep"), key=lambda i: i.cost_per_byte)
    for item in left:
        yield {item.value: "keep"}
    yield from ({i.value: other} for i in left for other in i.choices[1:] if other != chosen[i.value])
    yield from _exchanges(left[:PARTNERS], kept, best)
    yield from ({item.value: choice} for item in kept[: 4 * PARTNERS] for choice in item.choices[1:])


def _all_changes(items: tuple[Candidate, ...]) -> Iterator[Change]:
    for size in (1, 2, 3):
        for chosen in combinations(items, size):
            for choices in product(*(item.choices for item in chosen)):
                yield {item.value: choice for item, choice in zip(chosen, choices, strict=True)}


def _exchanges(left: list[Candidate], kept: list[Candidate], best: Trial) -> Iterator[Change]:
    """Keep an expensive one, and let a kept one of about its size leave that costs less."""
    for expensive in left:
        large = (item for item in kept if item.memory_bytes >= expensive.memory_bytes // 2)
        cheaper = [item for item in large if item.cost_ms(item.leaving()) < _cost_ms(expensive, best)]
        for partner in cheaper[:PARTNERS]:
            for choice in partner.choices[1:]:
                yield {expensive.value: "keep", partner.value: choice}


def _cost_ms(item: Candidate, best: Trial) -> float:
    return item.cost_ms("recompute" if best.decisions[item.value] == "recompute" else "swap")


def improve_in_batches(trials: Trials, evaluations: int) -> None:
    """Try to keep more, and to change how activations leave, on the best plan.

    What fits is remembered in `trials`.

    Args:
        trials: holds the plans, before and after.
        evaluations: at most, for each of the three kinds of changes.
    """
    for change in (_kept, _recomputed, _swapped):
        if trials.best is not None:
            _climb_in_batches(trials, trials.best, change(trials, trials.best), evaluations)


def _climb_in_batches(trials: Trials, current: Trial, changes: Sequence[tuple[int, Choice]], evaluations: int) -> None:
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
