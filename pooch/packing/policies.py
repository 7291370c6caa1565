"""The ways to pack, by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..ground.errors import UsageError
from ..ir.layout import Block, Layout, bound_of
from .fallback import best_of_rules, skyline
from .first_fit import TooLate, by_size, filled, first_fit
from .instance import Instance, Integers, Order, arena_of, instance_of, part_of
from .kernels import Kernels, Searched, kernels

_NO_ROUND_LIMIT = 2**62
_SHORTEST_S = 1e-6  # of a search
Policy = Callable[[Instance, Kernels | None, int, int, float], Searched]


def pack(
    blocks: Sequence[Block],
    *,
    policy: str = "ours",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_rounds: int = _NO_ROUND_LIMIT,
    capacity_bytes: int = 0,
) -> Layout:
    """Place blocks in one arena such that no two that live at the same time overlap.

    Without a C++ compiler nothing is searched: "ours" is the best of its first layouts and of first fit.

    Args:
        blocks: what to place.
        policy: "ours", "sekiyama" or "greedy_by_size".
        time_limit_s: CPU seconds that "ours" searches for, unless it reaches the bound before.
        seed: of the search.
        max_rounds: of the search. A search that this or the bound ends gives the same layout every time; one that the
            clock ends need not.
        capacity_bytes: what "ours" is content with: it ends at the first arena that is no larger.

    Raises:
        UsageError: no such policy, or a block without a lifetime, with negative bytes or without an alignment.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown packing policy {policy!r}: choose from {', '.join(POLICIES)}")
    if not time_limit_s > 0 or max_rounds < 0 or not 0 <= seed < 2**64 or capacity_bytes < 0:
        raise UsageError("a search needs more than 0 seconds, 0 or more rounds and bytes, and a seed of 64 bits")
    begun_s = time.thread_time()
    instance = instance_of(blocks)
    time_limit_s = max(time_limit_s - 2 * (time.thread_time() - begun_s), _SHORTEST_S)  # as much again at the end
    offsets, rounds, is_proven = np.zeros(len(blocks), dtype=np.int64), 0, True
    used = kernels()
    if len(instance.sizes):
        aim = replace(instance, bound_bytes=max(instance.bound_bytes, capacity_bytes))
        found = POLICIES[policy](aim, used, seed, max_rounds, time_limit_s)
        arena_bytes, rounds = arena_of(instance, found.offsets), found.rounds
        is_proven = arena_bytes <= max(instance.bound_bytes, found.refuted_bytes + instance.granule_bytes)
        offsets[instance.places] = found.offsets
        if policy == "ours" and used is not None and not is_proven and arena_bytes > capacity_bytes:
            offsets[instance.places], is_proven = proven(instance, used, found.offsets)
    ends = [offset + block.size_bytes for offset, block in zip(offsets.tolist(), blocks, strict=True)]
    return Layout(
        tuple(offsets.tolist()), max(ends, default=0), bound_of(blocks), policy, rounds, used is not None, is_proven
    )


def sekiyama(instance: Instance, used: Kernels | None, seed: int, max_rounds: int, time_limit_s: float) -> Searched:
    """Best fit on a skyline, the longest lifetime first (Sekiyama et al. 2018); the first given on ties."""
    order = _descending(instance.lifetimes)
    return Searched(skyline(instance, order) if used is None else used.decode(instance, order))


def greedy_by_size(
    instance: Instance, used: Kernels | None, seed: int, max_rounds: int, time_limit_s: float
) -> Searched:
    """First fit, the largest block first; the longest lifetime, then the first given, on ties."""
    return Searched(first_fit(instance, by_size(instance)))


_MOST_PROVEN = 60  # blocks of an instance that is small enough to try all layouts
_LOOKS = 1_200_000  # at blocks, after which the proof is given up
# Of the bound: a level of the search packs the blocks of at least this size; the last one packs all.
_LEVELS = (0.003, 0.001, 0.0)


def ours(instance: Instance, used: Kernels | None, seed: int, max_rounds: int, time_limit_s: float) -> Searched:
    """Skylines of eight orders, then searches in turns: orders, ejections, the tree of layouts. Large blocks are first.

    Many small blocks make every step of a search slow and decide little. So it begins with the largest blocks alone,
    until they fit below the bound of all; then smaller ones come where first fit has room for them, and so on.
    Without kernels, the skylines and first fit are all.
    """
    if used is None:
        return Searched(best_of_rules(instance, starting_orders(instance), time_limit_s))
    started_s = time.thread_time()

    def left_s() -> float:
        return time_limit_s - (time.thread_time() - started_s)

    offsets, rounds = used.search(instance, starting_orders(instance), seed, 0, time_limit_s).offsets, 0
    chosen = np.zeros(0, dtype=np.int64)
    placed = offsets[chosen]
    filling_s = 0.0  # what it takes to place the other blocks, once it is known
    refuted_bytes = 0
    levels = _levels(instance)
    for number, level in enumerate(levels):
        if arena_of(instance, offsets) <= instance.bound_bytes or left_s() <= 0 or rounds >= max_rounds:
            break
        is_last = number == len(levels) - 1
        share = 1 / (len(levels) - number)
        most = math.ceil((max_rounds - rounds) * share)
        if is_last:
            searched = used.search(instance, starting_orders(instance), seed, most, left_s(), offsets)
            refuted_bytes = max(refuted_bytes, searched.refuted_bytes)
            offsets = min(searched.offsets, offsets, key=lambda each: arena_of(instance, each))
            return Searched(offsets, rounds + searched.rounds, refuted_bytes)
        if left_s() <= 2 * filling_s:
            continue
        part = part_of(instance, level)
        try:
            start = filled(part, level, chosen, placed, left_s()) if len(chosen) else None
            for_search_s = max(left_s() - filling_s, _SHORTEST_S) * share
            searched = used.search(part, starting_orders(part), seed, most, for_search_s, start)
            chosen, placed, rounds, before_s = level, searched.offsets, rounds + searched.rounds, left_s()
            if searched.refuted_bytes > refuted_bytes:  # a part has no smaller arena than the whole
                refuted_bytes = searched.refuted_bytes
                aim_bytes = max(instance.bound_bytes, refuted_bytes + instance.granule_bytes)
                instance = replace(instance, bound_bytes=aim_bytes)
            whole = filled(instance, np.arange(len(instance.sizes)), chosen, placed, before_s)
        except TooLate:  # the levels of fewer blocks come to nothing then
            filling_s = math.inf
            continue
        filling_s = before_s - left_s()
        offsets = whole if arena_of(instance, whole) < arena_of(instance, offsets) else offsets
    return Searched(offsets, rounds, refuted_bytes)


def proven(instance: Instance, used: Kernels, offsets: Integers) -> tuple[Integers, bool]:
    """Look for smaller arenas until there is none: the best offsets, and whether it was proven that they are."""
    if len(instance.sizes) > _MOST_PROVEN:
        return offsets, False
    while True:
        found = used.exhaust(instance, arena_of(instance, offsets) - instance.granule_bytes, _LOOKS)
        if found is None or found is False:
            return offsets, found is False
        offsets = found


def _levels(instance: Instance) -> list[Integers]:
    """The blocks of each level, ascending; a level that adds hardly any is left out."""
    found: list[Integers] = []
    for share in _LEVELS:
        level = np.flatnonzero(instance.sizes >= share * instance.bound_bytes)
        is_last = share == _LEVELS[-1]
        if is_last or 2 <= len(level) <= 0.9 * len(instance.sizes):
            found.append(level)
    return found


POLICIES: Mapping[str, Policy] = {"ours": ours, "sekiyama": sekiyama, "greedy_by_size": greedy_by_size}


def starting_orders(instance: Instance) -> list[Order]:
    """Return the eight orders that a search begins with."""
    lifetimes, sizes = instance.lifetimes.astype(float), instance.sizes.astype(float)
    steps = (instance.upper - instance.lower).astype(float)
    keys = [
        lifetimes,
        sizes,
        lifetimes * sizes,
        instance.upper,
        -instance.lower,
        lifetimes**2 * sizes,
        steps,
        steps * sizes,
    ]
    return [_descending(key) for key in keys]


def _descending(key: np.ndarray) -> Order:
    return np.argsort(-key, kind="stable").astype(np.int32)
