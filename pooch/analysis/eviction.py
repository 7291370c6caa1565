"""Which saved activation leaves when memory runs short and no plan decides: scores; the lowest leaves first.

Shared by whatever runs a step without a plan and by its simulation (`analysis/online`). Nothing here knows what a
tensor is: values are ids, times are in ms, and the caller says which values are evicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

Neighbours = Callable[[int], Iterable[int]]


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


def replay_cost_ms(own_ms: float, ancestors_ms: float) -> float:
    """What dropping a value costs: its replay, and those of missing ancestors before it.

    Dropped values that are made from it are left out: a backward pass reads them first, and what their replays make on
    the way stays.

    Args:
        own_ms: the value's own replay, its sources being there.
        ancestors_ms: the same, summed over the dropped values that have to be made again before it.
    """
    return own_ms + ancestors_ms


def copy_cost_ms(out_ms: float, in_ms: float, hidden_ms: float = 0.0) -> float:
    """What copying a value out and back costs, less the time that compute hides of it."""
    return max(0.0, out_ms + in_ms - hidden_ms)


def distance(current: float, saved: float) -> float:
    """About how far ahead a value's next use is: positions in the order of saving, at least 1.

    A backward pass reads values in reverse order of saving. While it runs, `current` is the position of the value that
    it read last; in the forward pass, that of the value saved last, and the distance is the value's staleness.
    """
    return max(1.0, current - saved)


def online_score(cost_ms: float, size_bytes: int, ahead: float) -> float:
    """What the cheaper way of leaving costs, per byte and per square root of the distance to the next use.

    The square root, because the distance is certain in the backward pass alone: in the forward pass, everything waits
    longer than this, and the peak lies before all of it.

    Args:
        cost_ms: of the cheaper way.
        size_bytes: that it frees.
        ahead: see `distance`.
    """
    return cost_ms / (max(1, size_bytes) * math.sqrt(ahead))


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
