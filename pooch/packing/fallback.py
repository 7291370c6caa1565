"""What packs where there is no C++ compiler: the skyline, and the best of a few rules instead of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from .first_fit import TooLate, by_size, first_fit
from .instance import Instance, Integers, Order, arena_of

_PLACED_BETWEEN_LOOKS = 256  # at the clock


def skyline(instance: Instance, order: Order, limit_s: float = math.inf) -> Integers:
    """Return the offsets of the instance's blocks by best fit on a skyline, as the compiled one does.

    The lowest segment, the leftmost on ties, takes the first block of the order that lives within it. Where there is
    none, it is lifted to its lower neighbour.

    Raises:
        TooLate: it takes more CPU seconds than `limit_s`.
    """
    begun_s = time.thread_time()
    count, n_times = len(order), instance.n_times
    by_begin = np.argsort(instance.lower, kind="stable")
    first_of = np.searchsorted(instance.lower[by_begin], np.arange(n_times + 1))
    ranks = np.argsort(order)[by_begin]  # `count` once a block is placed
    upper = instance.upper[by_begin]
    heights = np.zeros(n_times - 1, dtype=np.int64)
    offsets = np.zeros(count, dtype=np.int64)
    placed = 0
    while placed < count:
        start = int(heights.argmin())
        height = int(heights[start])
        ends = heights[start:] > height
        end = start + int(ends.argmax()) if ends.any() else n_times - 1
        inside = slice(first_of[start], first_of[end])
        waiting = np.where(upper[inside] <= end, ranks[inside], count)
        best = int(waiting.min(initial=count))
        if best == count:
            heights[start:end] = min(int(heights[t]) for t in (start - 1, end) if 0 <= t < n_times - 1)
            continue
        block = order[best]
        unit = int(instance.alignments[block])
        offsets[block] = -(-height // unit) * unit
        heights[instance.lower[block] : instance.upper[block]] = offsets[block] + instance.sizes[block]
        ranks[first_of[start] + int(waiting.argmin())] = count
        placed += 1
        if placed % _PLACED_BETWEEN_LOOKS == 0 and time.thread_time() - begun_s >= limit_s:
            raise TooLate
    return offsets


def best_of_rules(instance: Instance, orders: Sequence[Order], limit_s: float) -> Integers:
    """Return the lowest layout of the orders' skylines and of first fit, up to the bound or the limit.

    The first skyline is finished even if it is late, since there is no layout without it.
    """
    begun_s = time.thread_time()
    best = skyline(instance, orders[0])
    skylines = [partial(skyline, instance, order) for order in orders[1:]]
    for rule in (*skylines, partial(first_fit, instance, by_size(instance))):
        left_s = limit_s - (time.thread_time() - begun_s)
        if arena_of(instance, best) <= instance.bound_bytes or left_s <= 0:
            break
        try:
            found = rule(left_s)
        except TooLate:
            break
        best = min(best, found, key=lambda offsets: arena_of(instance, offsets))
    return best
