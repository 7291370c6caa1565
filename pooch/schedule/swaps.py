"""When swapped values leave (as late as memory permits) and come back (as early as memory permits)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy

from pooch.ir.dataflow import Dataflow
from pooch.ir.occupancy import Occupancy


@dataclass(frozen=True, slots=True)
class Swap:
    """One value's way out and back.

    Attributes:
        value: its id. copy_slot: where the copy out starts.
        ready_slot: first slot at which it can be freed: the program has let go of it and the copy has started.
        need_slot: where it has to be back, or None where nobody reads it again.
        free_slot, in_slot: where it is freed and where the copy in starts (-1: not yet decided, or never).
    """

    value: int
    copy_slot: int
    ready_slot: int
    need_slot: int | None
    free_slot: int = -1
    in_slot: int = -1


class SwapTables:
    """What swaps need to know of a dataflow, worked out once."""

    def __init__(self, dataflow: Dataflow) -> None:
        values = dataflow.profile.values
        self.anchor_slots = list(dataflow.anchor_slots)
        self.action_slots = sorted({*dataflow.forward_slots, *self.anchor_slots})
        self.allocated = dataflow.allocated_bytes
        self.life_ends = dataflow.life_ends
        self.death = [value.death for value in values]
        self.copy_slot = {v.id: self._next_action(v.producer + 1) for v in dataflow.activations}
        self.ready_slot = {
            v.id: self._next_action(max(self.copy_slot[v.id], v.release + 1)) for v in dataflow.activations
        }
        self.last_action = [bisect_right(self.action_slots, slot) - 1 for slot in range(dataflow.end)]
        self.never = dataflow.end

    def _next_action(self, slot: int) -> int:
        """First slot from `slot` on at which a schedule can act; past the end where there is none."""
        place = bisect_left(self.action_slots, slot)
        return self.action_slots[place] if place < len(self.action_slots) else 1 << 60

    def last_action_slot(self, slot: int) -> int:
        """Last slot up to `slot` at which a schedule can act, -1 where there is none."""
        place = self.last_action[slot]
        return self.action_slots[place] if place >= 0 else -1

    def candidate(self, value: int, need_slot: int | None) -> Swap | None:
        """The swap of a value, or None where it cannot leave before it is needed (or is let go of before that)."""
        ready = self.ready_slot[value]
        latest = self.death[value] if need_slot is None else need_slot - 1
        if ready > latest or (need_slot is not None and need_slot > self.death[value]):
            return None
        return Swap(value, self.copy_slot[value], ready, need_slot)

    def back_point(self, swap: Swap) -> int:
        """First point at which a freed value counts again (or would have died)."""
        return self.life_ends[swap.value] if swap.need_slot is None else 2 * swap.need_slot


def place_swaps(tables: SwapTables, candidates: list[Swap], memory: Occupancy, budget_bytes: int) -> list[Swap]:
    """Decide where each candidate is freed and where its copy in starts; those that can stay are left out.

    Args:
        candidates: in order of production (the order of their copies out).
        memory: of the step with all candidates staying; changed in place to what it is with the swaps.
    """
    freed = _place_frees(tables, candidates, memory, budget_bytes)
    return _place_copies_in(tables, freed, memory, budget_bytes)


def _place_frees(tables: SwapTables, candidates: list[Swap], memory: Occupancy, budget_bytes: int) -> list[Swap]:
    """Where a slot is over the budget, free the values that were copied out first, until it fits."""
    live, settled = memory.point_bytes, memory.settled_bytes
    waiting = sorted(range(len(candidates)), key=lambda place: -candidates[place].ready_slot)
    free_able: list[int] = []  # heap of places in `candidates`
    freed: list[Swap] = []
    point = 0
    while waiting or free_able:
        point = _first_over(live, point, budget_bytes)
        if point < 0:
            break
        slot = tables.last_action_slot(point // 2)
        while waiting and candidates[waiting[-1]].ready_slot <= slot:
            heapq.heappush(free_able, waiting.pop())
        while free_able and tables.back_point(candidates[free_able[0]]) <= point:
            heapq.heappop(free_able)
        if not free_able:
            point = 2 * (point // 2) + 2
            continue
        swap = candidates[heapq.heappop(free_able)]
        away = slice(2 * slot, tables.back_point(swap))
        live[away] -= tables.allocated[swap.value]
        settled[away] -= tables.allocated[swap.value]
        freed.append(Swap(swap.value, swap.copy_slot, swap.ready_slot, swap.need_slot, slot))
    return freed


def _first_over(live: numpy.ndarray, start: int, budget_bytes: int) -> int:
    """First point from `start` on that is over the budget, or -1."""
    if start >= len(live):
        return -1
    over = live[start:] > budget_bytes
    place = int(over.argmax())
    return start + place if over[place] else -1


def _place_copies_in(tables: SwapTables, freed: list[Swap], memory: Occupancy, budget_bytes: int) -> list[Swap]:
    """In order of need, start each copy as early as there is room for it until its need."""
    placed = [swap for swap in freed if swap.need_slot is None]
    earliest = 0
    for swap in sorted((s for s in freed if s.need_slot is not None), key=lambda s: s.need_slot or 0):
        assert swap.need_slot is not None
        first = max(earliest, bisect_right(tables.anchor_slots, swap.free_slot))
        place = _earliest_anchor(tables, swap, first, memory, budget_bytes)
        in_slot = tables.anchor_slots[place]
        _occupy(memory, in_slot, swap.need_slot, tables.allocated[swap.value])
        earliest = place
        placed.append(Swap(swap.value, swap.copy_slot, swap.ready_slot, swap.need_slot, swap.free_slot, in_slot))
    return placed


def _earliest_anchor(tables: SwapTables, swap: Swap, first: int, memory: Occupancy, budget_bytes: int) -> int:
    """Place in `anchor_slots` of the first anchor from which on the value fits until its need."""
    assert swap.need_slot is not None
    room = budget_bytes - tables.allocated[swap.value]
    need_place = bisect_left(tables.anchor_slots, swap.need_slot)
    if first >= need_place:
        return need_place
    start = 2 * tables.anchor_slots[first]
    over = (memory.point_bytes[start : 2 * swap.need_slot] > room)[::-1]
    back = int(over.argmax())
    if not over[back]:
        return first
    last_over = 2 * swap.need_slot - 1 - back
    slot = last_over // 2
    place = bisect_right(tables.anchor_slots, slot)
    # Only the entry is too high, and only while replays run there: the copy starts after them.
    after_replays = last_over == 2 * slot and memory.settled_bytes[last_over] <= room
    if after_replays and tables.anchor_slots[place - 1] == slot:
        place -= 1
    return min(place, need_place)


def _occupy(memory: Occupancy, in_slot: int, need_slot: int, number_bytes: int) -> None:
    """The value takes room from after the replays at `in_slot` on until the need, where it already counts."""
    if in_slot == need_slot:
        return
    live, settled = memory.point_bytes, memory.settled_bytes
    settled[2 * in_slot : 2 * need_slot] += number_bytes
    live[2 * in_slot + 1 : 2 * need_slot] += number_bytes
    live[2 * in_slot] = max(live[2 * in_slot], settled[2 * in_slot])
