"""First fit: each block of an order lies as low as those before it permit."""

from __future__ import annotations

import math
import time

import numpy as np

from .instance import Instance, Integers

_MANY_BLOCKS = 4000  # fewer take little time
_EARLY = 8  # after this part of the blocks, which takes about the square of it of the time, the rest is estimated
_PLACED_BETWEEN_LOOKS = 64  # at the clock


class TooLate(Exception):
    """There is not enough time to place all blocks."""


def first_fit(instance: Instance, order: Integers, limit_s: float = math.inf) -> Integers:
    """Return the offsets of the instance's blocks, placed one by one.

    Raises:
        TooLate: it takes more CPU seconds than `limit_s`, or seems to.
    """
    begun_s = time.thread_time()
    count = len(order)
    lower, upper, sizes = instance.lower[order], instance.upper[order], instance.sizes[order]
    offsets = np.zeros(count, dtype=np.int64)
    for k in range(count):
        if k % _PLACED_BETWEEN_LOOKS == 0 and count >= _MANY_BLOCKS:
            taken_s = time.thread_time() - begun_s
            is_early = k >= count // _EARLY > k - _PLACED_BETWEEN_LOOKS
            if taken_s * (_EARLY**2 if is_early else 1) > limit_s:
                raise TooLate
        beside = np.flatnonzero((lower[:k] < upper[k]) & (upper[:k] > lower[k]))
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        begins, ends = offsets[beside], offsets[beside] + sizes[beside]
        unit = instance.alignments[order[k]]
        # Candidates: the bottom, and above each block below which all is taken; the last one always fits.
        starts = -(-np.maximum.accumulate(np.concatenate([[0], ends])) // unit) * unit
        fits = starts[:-1] + sizes[k] <= begins
        offsets[k] = starts[np.argmax(fits)] if fits.any() else starts[-1]
    found = np.zeros(count, dtype=np.int64)
    found[order] = offsets
    return found


def by_size(instance: Instance) -> Integers:
    """Return the order of the largest block first; the longest lifetime, then the first given, on ties."""
    return np.lexsort((-instance.lifetimes, -instance.sizes))


def filled(
    instance: Instance, blocks: Integers, placed: Integers, offsets: Integers, limit_s: float = math.inf
) -> Integers:
    """Return the offsets of all blocks of an instance: those with a place as low as they can fall, then the others.

    Args:
        instance: of the blocks.
        blocks: which blocks they are, of those that `placed` counts in, ascending.
        placed: the blocks with a place, ascending.
        offsets: of them.
        limit_s: CPU seconds.

    Raises:
        TooLate: they do not suffice.
    """
    has_place = np.isin(blocks, placed)
    below_first = np.flatnonzero(has_place)[np.argsort(offsets, kind="stable")]
    others = np.flatnonzero(~has_place)
    others = others[np.lexsort((-instance.lifetimes[others], -instance.sizes[others]))]
    return first_fit(instance, np.concatenate([below_first, others]), limit_s)
