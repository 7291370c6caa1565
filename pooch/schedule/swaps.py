"""When swapped values leave (as late as memory permits) and come back (as early as memory permits)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy

from pooch.ir.dataflow import Dataflow
from pooch.ir.occupancy import Occupancy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A swapped value and the slots between which it can be away.

    Attributes:
        value: its id. copy_slot: where the copy out starts.
        ready_slot: first slot at which it can be freed: the program has let go of it and the copy has started.
        need_slot: where it has to be back, or -1 where nobody reads it again.
        back_point: first point at which it counts again, once freed (or would have died).
        bytes: what it takes on the device.
    """

    value: int
    copy_slot: int
    ready_slot: int
    need_slot: int
    back_point: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Swap:
    """One value's way out and back.

    Attributes:
        candidate: what is moved. free_slot: where it is freed.
        in_slot: where the copy in starts, -1 where it never comes back.
    """

    candidate: Candidate
    free_slot: int
    in_slot: int


class SwapTables:
    """What swaps need to know of a dataflow, worked out once."""

    def __init__(self, dataflow: Dataflow) -> None:
        values = dataflow.profile.values
        self.anchor_slots = list(dataflow.anchor_slots)
        self.action_slots = sorted({*dataflow.forward_slots, *self.anchor_slots})
        self.allocated = dataflow.allocated_bytes
        self.size_bytes = [value.size_bytes for value in values]
        self.life_ends = dataflow.life_ends
        self.death = [value.death for value in values]
        self.copy_slot = {v.id: self._next_action(v.producer + 1) for v in dataflow.activations}
        self.ready_slot = {
            v.id: self._next_action(max(self.copy_slot[v.id], v.release + 1)) for v in dataflow.activations
        }
        self.last_action = [bisect_right(self.action_slots, slot) - 1 for slot in range(dataflow.end)]
        self._candidates: dict[tuple[int, int], Candidate | None] = {}

    def _next_action(self, slot: int) -> int:
        """First slot from `slot` on at which a schedule can act; past the end where there is none."""
        place = bisect_left(self.action_slots, slot)
        return self.action_slots[place] if place < len(self.action_slots) else 1 << 60

    def last_action_slot(self, slot: int) -> int:
        """Last slot up to `slot` at which a schedule can act, -1 where there is none."""
        place = self.last_action[slot]
        return self.action_slots[place] if place >= 0 else -1

    def candidate(self, value: int, need_slot: int) -> Candidate | None:
        """The value as a candidate, or None where it cannot leave before it is needed (or dies before that)."""
        key = (value, need_slot)
        if key not in self._candidates:
            self._candidates[key] = self._make_candidate(value, need_slot)
        return self._candidates[key]

    def _make_candidate(self, value: int, need_slot: int) -> Candidate | None:
        ready = self.ready_slot[value]
        latest = self.death[value] if need_slot < 0 else need_slot - 1
        if ready > latest or need_slot > self.death[value]:
            return None
        back_point = self.life_ends[value] if need_slot < 0 else 2 * need_slot
        return Candidate(value, self.copy_slot[value], ready, need_slot, back_point, self.allocated[value])


def place_swaps(tables: SwapTables, candidates: list[Candidate], memory: Occupancy, budget_bytes: int) -> list[Swap]:
    """Decide where each candidate is freed and where its copy in starts; those that can stay are left out.

    Args:
        candidates: in order of production (the order of their copies out).
        memory: of the step with all candidates staying; changed in place to what it is with the swaps.

    Returns:
        The swaps in order of need.
    """
    freed = _place_frees(tables, candidates, memory.point_bytes, budget_bytes)
    return _place_copies_in(tables, freed, memory, budget_bytes)


def _place_frees(
    tables: SwapTables, candidates: list[Candidate], live: numpy.ndarray, budget_bytes: int
) -> list[tuple[Candidate, int]]:
    """Where a slot is over the budget, free the values that were copied out first, until it fits."""
    waiting = sorted(range(len(candidates)), key=lambda place: -candidates[place].ready_slot)
    free_able: list[int] = []  # heap of places in `candidates`
    freed: list[tuple[Candidate, int]] = []
    point = 0
    while waiting or free_able:
        point = _first_over(live, point, budget_bytes)
        if point < 0:
            break
        slot = tables.last_action_slot(point // 2)
        while waiting and candidates[waiting[-1]].ready_slot <= slot:
            heapq.heappush(free_able, waiting.pop())
        while free_able and candidates[free_able[0]].back_point <= point:
            heapq.heappop(free_able)
        if not free_able:
            point = 2 * (point // 2) + 2
            continue
        leaving = candidates[heapq.heappop(free_able)]
        live[2 * slot : leaving.back_point] -= leaving.bytes
        freed.append((leaving, slot))
    return freed


def _first_over(live: numpy.ndarray, start: int, budget_bytes: int) -> int:
    """First point from `start` on that is over the budget, or -1."""
    if start >= len(live):
        return -1
    over = live[start:] > budget_bytes
    place = int(over.argmax())
    return start + place if over[place] else -1


def _place_copies_in(
    tables: SwapTables, freed: list[tuple[Candidate, int]], memory: Occupancy, budget_bytes: int
) -> list[Swap]:
    """In order of need, start each copy as early as there is room for it until its need."""
    placed = []
    earliest = 0
    for candidate, free_slot in sorted(freed, key=lambda item: item[0].need_slot):
        if candidate.need_slot < 0:
            placed.append(Swap(candidate, free_slot, -1))
            continue
        first = max(earliest, bisect_right(tables.anchor_slots, free_slot))
        earliest = _earliest_anchor(tables, candidate, first, memory, budget_bytes)
        in_slot = tables.anchor_slots[earliest]
        _occupy(memory, in_slot, candidate)
        placed.append(Swap(candidate, free_slot, in_slot))
    return placed


def _earliest_anchor(tables: SwapTables, candidate: Candidate, first: int, memory: Occupancy, budget_bytes: int) -> int:
    """Place in `anchor_slots` of the first anchor from which on the value fits until its need."""
    room = budget_bytes - candidate.bytes
    need_place = bisect_left(tables.anchor_slots, candidate.need_slot)
    if first >= need_place:
        return need_place
    live = memory.point_bytes
    over = (live[2 * tables.anchor_slots[first] : candidate.back_point] > room)[::-1]
    distance = int(over.argmax())
    if not over[distance]:
        return first
    last_over = candidate.back_point - 1 - distance
    slot = last_over // 2
    place = bisect_right(tables.anchor_slots, slot)
    # Where only an entry is too high, and only while replays run there, the copy starts after them.
    excess = memory.entry_excess_bytes.get(slot, 0) if last_over == 2 * slot else 0
    if excess and live[last_over] - excess <= room:
        place -= 1
    return min(place, need_place)


def _occupy(memory: Occupancy, in_slot: int, candidate: Candidate) -> None:
    """The value takes room from after the replays at `in_slot` on until its need, where it already counts."""
    if in_slot == candidate.need_slot:
        return
    live, excess = memory.point_bytes, memory.entry_excess_bytes.get(in_slot, 0)
    live[2 * in_slot + 1 : candidate.back_point] += candidate.bytes
    if excess:
        memory.entry_excess_bytes[in_slot] = max(0, excess - candidate.bytes)
    live[2 * in_slot] += max(0, candidate.bytes - excess)
