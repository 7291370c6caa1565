"""Decides when values leave (as late as memory permits) and come back (as early as memory permits)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import Occupancy

# The order in which values leave if memory is short: those that cost nothing, then those that leave anyway, then those
# that need an additional copy back, beginning with the one that is needed last.
AbsenceKind = Literal["recompute", "swap", "gap"]
_RANKS = {"recompute": 0, "swap": 1, "gap": 2}


@dataclass(frozen=True, slots=True)
class AwayWindow:
    """A value, and the slots between which it can be away.

    Attributes:
        value: its id.
        kind: "swap": a swapped value, between its last use by the forward pass and its need; "gap": a swapped value,
            between two looks of the forward pass at it; "recompute": a recomputed value, between its last use and its
            release.
        copy_slot: where the copy out starts. -1: there is none.
        ready_slot: first slot at which its bytes can be freed, as nothing looks at it and the copy has started.
        let_go_slot: first of these slots at which the program no longer holds it; before it, the storage is emptied.
        need_slot: where it has to be back. -1: it is not read again.
        back_point: first point at which its bytes count again (or at which it would have died).
        bytes: its size on the device.
    """

    value: int
    kind: AbsenceKind
    copy_slot: int
    ready_slot: int
    let_go_slot: int
    need_slot: int
    back_point: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Absence:
    """The way of a value out and back.

    Attributes:
        window: what leaves.
        out_slot: where its bytes are freed.
        in_slot: where the copy in starts. -1: there is none.
    """

    window: AwayWindow
    out_slot: int
    in_slot: int


class SwapTables:
    """The parts of a dataflow that swaps need, prepared once."""

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow = dataflow
        self._values = values = dataflow.profile.values
        self.anchor_slots = list(dataflow.anchor_slots)
        self.forward_slots = dataflow.forward_slots
        self.action_slots = sorted({*dataflow.forward_slots, *self.anchor_slots})
        self.allocated = dataflow.allocated_bytes
        self.size_bytes = [value.size_bytes for value in values]
        self.life_ends = dataflow.life_ends
        self.death = [value.death for value in values]
        self.copy_slot = {v.id: self._next_action(v.producer + 1) for v in dataflow.activations}
        self.ready_slot = {
            v.id: self._next_action(max(self.copy_slot[v.id], dataflow.last_use(v) + 1)) for v in dataflow.activations
        }
        self.let_go_slot = {
            v.id: self._next_action(max(self.copy_slot[v.id], v.release + 1)) for v in dataflow.activations
        }
        self.last_action = [bisect_right(self.action_slots, slot) - 1 for slot in range(dataflow.end)]
        self._windows: dict[tuple[int, int], tuple[AwayWindow, ...]] = {}
        self._recomputed: dict[int, tuple[AwayWindow, ...]] = {}

    def _next_action(self, slot: int) -> int:
        """Return the first slot from `slot` on at which a schedule can act, or a slot past the end."""
        place = bisect_left(self.action_slots, slot)
        return self.action_slots[place] if place < len(self.action_slots) else 1 << 60

    def last_action_slot(self, slot: int) -> int:
        """Return the last slot up to `slot` at which a schedule can act, or -1."""
        place = self.last_action[slot]
        return self.action_slots[place] if place >= 0 else -1

    def swapped(self, value: int, need_slot: int) -> tuple[AwayWindow, ...]:
        """Return when a swapped value can be away: before its need, and in gaps of the forward pass."""
        key = (value, need_slot)
        if key not in self._windows:
            gaps = self._dataflow.gaps(self._values[value])
            self._windows[key] = (
                *self._tail(value, need_slot),
                *(self._window(value, "gap", gap.first_slot, gap.need_slot, 2 * gap.need_slot) for gap in gaps),
            )
        return self._windows[key]

    def _tail(self, value: int, need_slot: int) -> tuple[AwayWindow, ...]:
        """Return nothing if the value cannot leave before it is needed, or dies earlier."""
        ready = self.ready_slot[value]
        latest = self.death[value] if need_slot < 0 else need_slot - 1
        if ready > latest or need_slot > self.death[value]:
            return ()
        back_point = self.life_ends[value] if need_slot < 0 else 2 * need_slot
        return (self._window(value, "swap", ready, need_slot, back_point),)

    def recomputed(self, value: int) -> tuple[AwayWindow, ...]:
        """Return when a recomputed value can be away before the program releases it."""
        if value not in self._recomputed:
            ready, release = self.ready_slot[value], self._values[value].release
            # What the program holds has to be there again if it leaves the path, and gathered parameters are not then.
            can_leave = ready <= release and value not in self._dataflow.from_gathered
            absence = self._window(value, "recompute", ready, -1, 2 * release + 2)
            self._recomputed[value] = (absence,) if can_leave else ()
        return self._recomputed[value]

    def _window(self, value: int, kind: AbsenceKind, ready: int, need: int, back_point: int) -> AwayWindow:
        copy_slot = -1 if kind == "recompute" else self.copy_slot[value]
        let_go = self.let_go_slot[value]
        return AwayWindow(value, kind, copy_slot, ready, let_go, need, back_point, self.allocated[value])


def place_absences(
    tables: SwapTables, windows: Iterable[AwayWindow], memory: Occupancy, budget_bytes: int | numpy.ndarray
) -> list[Absence]:
    """Decide where each value leaves and where its copy in starts; values that can stay are left out.

    `memory` is that of the step if all of them stay; it is updated in place for the absences. The budget
    is one for all points or one for each.

    Returns:
        The absences in order of need.
    """
    budgets = numpy.broadcast_to(budget_bytes, memory.point_bytes.shape)
    left = _place_leaving(tables, sorted(windows, key=_first_leaving), memory.point_bytes, budgets)
    gaps = [(window, slot) for window, slot in left if window.kind == "gap"]
    others = [(window, slot) for window, slot in left if window.kind != "gap"]
    back_in_forward = _place_copies_in(tables.forward_slots, gaps, memory, budgets)
    return back_in_forward + _place_copies_in(tables.anchor_slots, others, memory, budgets)


def _first_leaving(window: AwayWindow) -> tuple[int, int, int]:
    """Sort key. Of the swapped values, the one copied out first leaves first: its copy is most likely complete."""
    latest_first = -window.back_point if window.kind == "gap" else 0
    return _RANKS[window.kind], latest_first, window.value


def _place_leaving(
    tables: SwapTables, windows: list[AwayWindow], live: numpy.ndarray, budgets: numpy.ndarray
) -> list[tuple[AwayWindow, int]]:
    """At every slot over the budget, let the first values leave that can, in the order of `windows`, until it fits."""
    waiting = sorted(range(len(windows)), key=lambda place: -windows[place].ready_slot)
    able: list[int] = []  # heap of places in `windows`
    left: list[tuple[AwayWindow, int]] = []
    point = 0
    while waiting or able:
        point = _first_over(live, point, budgets)
        if point < 0:
            break
        slot = tables.last_action_slot(point // 2)
        while waiting and windows[waiting[-1]].ready_slot <= slot:
            heapq.heappush(able, waiting.pop())
        while able and windows[able[0]].back_point <= point:
            heapq.heappop(able)
        if not able:
            point = 2 * (point // 2) + 2
            continue
        leaving = windows[heapq.heappop(able)]
        live[2 * slot : leaving.back_point] -= leaving.bytes
        left.append((leaving, slot))
    return left


def _first_over(live: numpy.ndarray, start: int, budgets: numpy.ndarray) -> int:
    """Return the first point from `start` on that is over its budget, or -1."""
    if start >= len(live):
        return -1
    over = live[start:] > budgets[start:]
    place = int(over.argmax())
    return start + place if over[place] else -1


def _place_copies_in(
    slots: Sequence[int], left: list[tuple[AwayWindow, int]], memory: Occupancy, budgets: numpy.ndarray
) -> list[Absence]:
    """In order of need, start each copy at the earliest of `slots` from which on there is room for it."""
    placed = []
    earliest = 0
    for window, out_slot in sorted(left, key=lambda item: item[0].need_slot):
        if window.need_slot < 0:
            placed.append(Absence(window, out_slot, -1))
            continue
        first = max(earliest, bisect_right(slots, out_slot))
        earliest = _earliest_place(slots, window, first, memory, budgets)
        in_slot = slots[earliest]
        _occupy(memory, in_slot, window)
        placed.append(Absence(window, out_slot, in_slot))
    return placed


def _earliest_place(
    slots: Sequence[int], window: AwayWindow, first: int, memory: Occupancy, budgets: numpy.ndarray
) -> int:
    """Return the index in `slots` of the first slot from which on the value fits until its need."""
    need_place = bisect_left(slots, window.need_slot)
    if first >= need_place:
        return need_place
    live = memory.point_bytes
    begin, end = 2 * slots[first], window.back_point
    over = (live[begin:end] > budgets[begin:end] - window.bytes)[::-1]
    distance = int(over.argmax())
    if not over[distance]:
        return first
    last_over = window.back_point - 1 - distance
    slot = last_over // 2
    place = bisect_right(slots, slot)
    # If only an entry is over the budget, and only while replays run in it, the copy starts after them.
    excess = memory.entry_excess_bytes.get(slot, 0) if last_over == 2 * slot else 0
    if excess and live[last_over] - excess <= budgets[last_over] - window.bytes:
        place -= 1
    return min(place, need_place)


def _occupy(memory: Occupancy, in_slot: int, window: AwayWindow) -> None:
    """Count the value from after the replays at `in_slot` until its need, where it already counts."""
    if in_slot == window.need_slot:
        return
    live, excess = memory.point_bytes, memory.entry_excess_bytes.get(in_slot, 0)
    live[2 * in_slot + 1 : window.back_point] += window.bytes
    if excess:
        memory.entry_excess_bytes[in_slot] = max(0, excess - window.bytes)
    live[2 * in_slot] += max(0, window.bytes - excess)
