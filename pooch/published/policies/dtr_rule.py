"""By what rule DTR drops: its score, with both ways to count what is evicted around a value."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from ...analysis.dataflow import Dataflow
from ...machine import EvictionPolicy, Value
from ...machine.eviction import Rule

Neighbourhood = Literal["exact", "eq"]
Neighbours = Callable[[int], Iterable[int]]
SMALLEST_SHARE = 0.01  # of the mean size: DTR's sampling looks at nothing smaller


@dataclass(frozen=True, slots=True)
class Makings:
    """How values are made from one another, which does not change during a step.

    Attributes:
        own_ms: by value that can be dropped: its replay, its sources being there.
        parents: by such a value: the values that its replay reads.
        children: by value: those that are made from it.
    """

    own_ms: Mapping[int, float]
    parents: Mapping[int, tuple[int, ...]]
    children: Mapping[int, tuple[int, ...]]

    def parents_of(self, value: int) -> tuple[int, ...]:
        """What its replay reads."""
        return self.parents.get(value, ())

    def children_of(self, value: int) -> tuple[int, ...]:
        """What is made from it."""
        return self.children.get(value, ())

    def around(self, value: int) -> tuple[int, ...]:
        """Both."""
        return (*self.parents_of(value), *self.children_of(value))


def makings_of(dataflow: Dataflow) -> Makings:
    """How the saved values of a step are made from one another."""
    recipes, times_ms = dataflow.recipes_from_saved, dataflow.replay_times_ms
    children: defaultdict[int, list[int]] = defaultdict(list)
    parents = {value: recipe.sources for value, recipe in recipes.items()}
    for value, sources in parents.items():
        for source in sources:
            children[source].append(value)
    own_ms = {value: sum(times_ms[op] for op in recipe.ops) for value, recipe in recipes.items()}
    return Makings(own_ms, parents, {value: tuple(made) for value, made in children.items()})


def dtr_score(own_ms: float, neighbourhood_ms: float, size_bytes: int, staleness_ms: float) -> float:
    """h_DTR of Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021): what recomputing it costs, per byte and
    staleness.

    Args:
        own_ms: the value's own recomputation, its inputs being there.
        neighbourhood_ms: the same, summed over its evicted neighbourhood.
        size_bytes: that it frees.
        staleness_ms: since its last access.
    """
    return (own_ms + neighbourhood_ms) / (max(1, size_bytes) * max(staleness_ms, 1e-9))


def reached(start: Iterable[int], neighbours: Neighbours, evicted: Collection[int]) -> set[int]:
    """The evicted values that are reached from `start` through evicted ones.

    With a value's parents as `start` and as `neighbours`, these are the ancestors that are made again before it; with
    children, the descendants that wait for it. Both together are its evicted neighbourhood e* in DTR.
    """
    found: set[int] = set()
    pending = [value for value in start if value in evicted]
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            pending += [other for other in neighbours(value) if other in evicted]
    return found


def evicted_neighbourhood(makings: Makings, value: int, missing: Collection[int]) -> set[int]:
    """DTR's e*: what has to be made again before the value, and what has to wait for it."""
    ancestors = reached(makings.parents_of(value), makings.parents_of, missing)
    return ancestors | reached(makings.children_of(value), makings.children_of, missing)


class EvictedClasses:
    """DTR's approximation of evicted neighbourhoods: classes of connected evicted values, each with a sum of costs.

    A union-find cannot split: a value that comes back takes its own cost out of the sum of its class, but what it
    connected stays connected. Directions are ignored as well, so a sum is never below that of the exact neighbourhood.
    """

    def __init__(self) -> None:
        self._node: dict[int, int] = {}  # evicted value -> its node; it gets a new one each time it leaves
        self._cost_ms: dict[int, float] = {}
        self._above: list[int] = []
        self._sum_ms: list[float] = []

    def evict(self, value: int, cost_ms: float, neighbours: Iterable[int]) -> None:
        """The value leaves: it and the classes of its evicted neighbours (parents and children) become one class."""
        node = len(self._above)
        self._above.append(node)
        self._sum_ms.append(cost_ms)
        self._node[value], self._cost_ms[value] = node, cost_ms
        for root in self._roots(neighbours):
            if root != node:
                self._above[root] = node
                self._sum_ms[node] += self._sum_ms[root]

    def restore(self, value: int) -> None:
        """The value is back: its class costs that much less."""
        self._sum_ms[self._root(self._node.pop(value))] -= self._cost_ms.pop(value)

    def neighbourhood_ms(self, neighbours: Iterable[int]) -> float:
        """The sum of the classes next to a value that is there, each counted once."""
        return sum(self._sum_ms[root] for root in self._roots(neighbours))

    def _roots(self, values: Iterable[int]) -> set[int]:
        return {self._root(self._node[value]) for value in values if value in self._node}

    def _root(self, node: int) -> int:
        while self._above[node] != node:
            self._above[node] = self._above[self._above[node]]  # path halving
            node = self._above[node]
        return node


class Dtr(Rule):
    """DTR as published: recompute only, the lowest h_DTR.

    Args:
        makings: of the step.
        now_ms: tells the time.
        neighbourhood: "exact": e*, the evicted ancestors and descendants; "eq": their classes by union-find, as in the
            authors' prototype.
        samples: as in the prototype, score only the square root of their number, drawn at random, and none smaller than
            a hundredth of the mean; the draws are the same each time.
    """

    def __init__(
        self,
        makings: Makings,
        now_ms: Callable[[], float],
        neighbourhood: Neighbourhood = "exact",
        samples: bool = False,
    ) -> None:
        self._makings, self._now_ms = makings, now_ms
        self._missing: set[int] = set()
        self._classes = EvictedClasses() if neighbourhood == "eq" else None
        self._last_access_ms: dict[int, float] = {}
        self._random = Random(0)
        self.policy = EvictionPolicy(self.score, may_copy=False, sample=self.sample if samples else None)

    def score(self, value: Value, cost_ms: float, ahead: float) -> float:
        """h_DTR; what cannot be made again comes last."""
        if math.isinf(cost_ms):
            return math.inf
        own_ms, stale_ms = self._makings.own_ms[value.number], self._now_ms() - self._last_access_ms[value.number]
        return dtr_score(own_ms, self._neighbourhood_ms(value.number), value.size_bytes, stale_ms)

    def sample(self, candidates: list[Value]) -> list[Value]:
        """Those that the prototype looks at."""
        least_bytes = SMALLEST_SHARE * sum(value.size_bytes for value in candidates) / len(candidates)
        large = [value for value in candidates if value.size_bytes >= least_bytes]
        return self._random.sample(large, math.isqrt(len(large) - 1) + 1)

    def _neighbourhood_ms(self, value: int) -> float:
        makings = self._makings
        if self._classes is not None:
            return self._classes.neighbourhood_ms(makings.around(value))
        return sum(makings.own_ms[other] for other in evicted_neighbourhood(makings, value, self._missing))

    def dropped(self, number: int) -> None:
        """Neighbours become dearer."""
        self._missing.add(number)
        if self._classes is not None:
            self._classes.evict(number, self._makings.own_ms[number], self._makings.around(number))

    def made_again(self, number: int) -> None:
        """Neighbours become cheaper."""
        self._missing.discard(number)
        if self._classes is not None:
            self._classes.restore(number)

    def accessed(self, number: int) -> None:
        """It is no longer stale."""
        self._last_access_ms[number] = self._now_ms()
