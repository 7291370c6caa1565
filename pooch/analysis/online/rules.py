"""Who leaves next: the scores of `analysis/eviction` over what the step knows of each value at that moment."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from ...ir.plan import Choice
from ..eviction import EvictedClasses, copy_cost_ms, distance, dtr_score, online_score, reached, replay_cost_ms

Neighbourhood = Literal["exact", "eq"]
SMALLEST_SHARE = 0.01  # of the mean size: DTR's sampling looks at nothing smaller


@dataclass(frozen=True, slots=True)
class Makings:
    """How values are made from one another, which does not change during a step.

    Attributes:
        own_ms: by value that can be dropped: its replay, its sources being there.
        parents: by such a value: the values with a decision that its replay reads.
        children: by value: those that are made from it.
    """

    own_ms: Mapping[int, float]
    parents: Mapping[int, tuple[int, ...]]
    children: Mapping[int, tuple[int, ...]]

    def parents_of(self, value: int) -> tuple[int, ...]:
        """What its replay reads, of the values with a decision."""
        return self.parents.get(value, ())

    def children_of(self, value: int) -> tuple[int, ...]:
        """What is made from it."""
        return self.children.get(value, ())

    def around(self, value: int) -> tuple[int, ...]:
        """Both."""
        return (*self.parents_of(value), *self.children_of(value))


@dataclass(frozen=True, slots=True)
class Evictable:
    """A value that could leave now.

    Attributes:
        value: its id.
        size_bytes: that it frees.
        can_drop: it can be made again.
        out_ms: to copy it out, compute waiting; 0 where the tier has it from an earlier time; inf where it cannot go.
        in_ms: to copy it in again.
        staleness_ms: since its last access.
        saved: its position in the order of saving.
    """

    value: int
    size_bytes: int
    can_drop: bool
    out_ms: float
    in_ms: float
    staleness_ms: float
    saved: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Who leaves, and how."""

    value: int
    choice: Choice


class Rule(Protocol):
    """Decides who leaves; one object serves one step."""

    def choose(self, there: Sequence[Evictable], current: int) -> Leaving | None:
        """Who of those that are there leaves next; None: nobody can.

        Args:
            there: the values that could leave.
            current: see `eviction.distance`.
        """
        ...

    def dropped(self, value: int) -> None:
        """The value was dropped."""
        ...

    def made_again(self, value: int) -> None:
        """A dropped value is back, or nobody wants it any more."""
        ...


class Cheapest:
    """Pooch's rule: what the cheaper of a replay and of copies costs, per byte and per square root of the distance."""

    def __init__(self, makings: Makings) -> None:
        self._makings = makings
        self._missing: set[int] = set()

    def choose(self, there: Sequence[Evictable], current: int) -> Leaving | None:
        """The lowest score; among equals the one saved first."""
        best_score, best = math.inf, None
        for each in there:
            copy_ms = copy_cost_ms(each.out_ms, each.in_ms)
            replay_ms = self._replay_ms(each)
            score = online_score(min(copy_ms, replay_ms), each.size_bytes, distance(current, each.saved))
            if score < best_score:
                best_score, best = score, Leaving(each.value, "swap" if copy_ms <= replay_ms else "recompute")
        return best

    def _replay_ms(self, each: Evictable) -> float:
        if not each.can_drop:
            return math.inf
        makings = self._makings
        ancestors = reached(makings.parents_of(each.value), makings.parents_of, self._missing)
        return replay_cost_ms(makings.own_ms[each.value], sum(makings.own_ms[value] for value in ancestors))

    def dropped(self, value: int) -> None:
        """Replays that read it become longer."""
        self._missing.add(value)

    def made_again(self, value: int) -> None:
        """Replays that read it become shorter."""
        self._missing.discard(value)


class Dtr:
    """DTR as published: recompute only, the lowest h_DTR.

    Args:
        makings: of the step.
        neighbourhood: "exact": e*, the evicted ancestors and descendants; "eq": their classes by union-find, as in the
            authors' prototype.
        samples: as in the prototype, score only the square root of their number, drawn at random, and none smaller than
            a hundredth of the mean; the draws are the same each time.
    """

    def __init__(self, makings: Makings, neighbourhood: Neighbourhood = "exact", samples: bool = False) -> None:
        self._makings = makings
        self._missing: set[int] = set()
        self._classes = EvictedClasses() if neighbourhood == "eq" else None
        self._random = Random(0) if samples else None

    def choose(self, there: Sequence[Evictable], current: int) -> Leaving | None:
        """The lowest score; among equals the one saved first."""
        droppable = [each for each in there if each.can_drop]
        if not droppable:
            return None
        return Leaving(min(self._looked_at(droppable), key=self._score).value, "recompute")

    def _looked_at(self, droppable: Sequence[Evictable]) -> Sequence[Evictable]:
        if self._random is None:
            return droppable
        least_bytes = SMALLEST_SHARE * sum(each.size_bytes for each in droppable) / len(droppable)
        large = [each for each in droppable if each.size_bytes >= least_bytes]
        return self._random.sample(large, math.isqrt(len(large) - 1) + 1)

    def _score(self, each: Evictable) -> float:
        own_ms = self._makings.own_ms[each.value]
        return dtr_score(own_ms, self._neighbourhood_ms(each.value), each.size_bytes, each.staleness_ms)

    def _neighbourhood_ms(self, value: int) -> float:
        makings = self._makings
        if self._classes is not None:
            return self._classes.neighbourhood_ms(makings.around(value))
        return sum(makings.own_ms[other] for other in evicted_neighbourhood(makings, value, self._missing))

    def dropped(self, value: int) -> None:
        """Neighbours become dearer."""
        self._missing.add(value)
        if self._classes is not None:
            self._classes.evict(value, self._makings.own_ms[value], self._makings.around(value))

    def made_again(self, value: int) -> None:
        """Neighbours become cheaper."""
        self._missing.discard(value)
        if self._classes is not None:
            self._classes.restore(value)


def evicted_neighbourhood(makings: Makings, value: int, missing: Collection[int]) -> set[int]:
    """DTR's e*: what has to be made again before the value, and what has to wait for it."""
    ancestors = reached(makings.parents_of(value), makings.parents_of, missing)
    return ancestors | reached(makings.children_of(value), makings.children_of, missing)
