"""Live device bytes at every point of a step under the actions of a schedule: one account for lowering and simulator.

What the account says, exactly:

- A *body* (point 2k + 1) is the in-core peak of the slot, less the values that the schedule has away, plus those
  that it holds longer than the step would.
- An *entry* (point 2k) is the highest of what is live from after the leading copy_out, free and empty actions of that
  entry until its op starts; a value freed there belongs to the body before. A replay counts at its own peak: what is
  live, all that it writes (less the storage that it may reuse in place), and the workspace measured in-core.
- A value that is read by replays is held until its `drop`; where autograd holds it longer, until its death.
- *Other microbatches in flight* hold what this one holds between its two passes: when its forward pass is over and no
  action of its backward pass has happened. The profile counts them as if they kept everything (`ir/profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy

from ..ir.schedule import Action
from .dataflow import Dataflow

LEADING = ("copy_out", "free", "empty")  # what comes first in an entry and does not count in its bytes


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes at the points of a step.

    Attributes:
        point_bytes: int64 array of shape (2 * ops,): the highest live bytes at each point.
        entry_excess_bytes: by slot, how far its entry rises (while replays run) above what its op then finds.
        resident_bytes: what a microbatch holds between its two passes; 0 where no other one is in flight.
    """

    point_bytes: numpy.ndarray
    entry_excess_bytes: dict[int, int]
    resident_bytes: int = 0


def occupancy(dataflow: Dataflow, actions: Iterable[Action], recomputed: Iterable[int]) -> Occupancy:
    """Account for `actions` (in order of execution) on top of the in-core step.

    Args:
        dataflow: of the step.
        actions: of the schedule.
        recomputed: values that autograd does not get, so that they leave when the program releases them.
    """
    walk = _Walk(dataflow, frozenset(recomputed))
    for action in actions:
        walk.do(action)
    return walk.finish()


def others_change(dataflow: Dataflow, resident_bytes: int) -> numpy.ndarray:
    """Bytes that other microbatches take at each point, less those that they take in-core (which the profile includes).

    Args:
        dataflow: of the step.
        resident_bytes: what each of them holds.

    Returns:
        int64 array of shape (2 * ops,).
    """
    in_flight = dataflow.profile.in_flight
    if in_flight.microbatches == 1:
        return numpy.zeros(2 * dataflow.end, dtype=numpy.int64)
    missing = dataflow.missing_gradients
    held, in_core = numpy.maximum(resident_bytes, missing), numpy.maximum(in_flight.resident_bytes, missing)
    fewer = (in_flight.microbatches - 2) * (resident_bytes - in_flight.resident_bytes)
    change: numpy.ndarray = numpy.repeat(held - in_core + fewer, 2)
    return change


class _Walk:
    """Changes against the in-core bytes, gathered action by action."""

    def __init__(self, dataflow: Dataflow, recomputed: frozenset[int]) -> None:
        self._dataflow = dataflow
        self._allocated = dataflow.allocated_bytes
        self._life_ends = dataflow.life_ends
        self._recomputed = recomputed
        self._change = [0] * (2 * dataflow.end + 1)
        self._arrived: dict[int, int] = {}  # point at which a value came back
        self._transient: set[int] = set()  # replayed intermediates
        self._entry_excess: dict[int, int] = {}
        self._slot = -1
        self._level = self._high = 0  # of the current entry, relative to where it began
        self._leading = True
        self._emptied: set[int] = set()
        self._turn = dataflow.profile.forward_ops  # the first slot of the backward pass
        self._acted_at_turn = 0  # what actions there change
        for value in recomputed:
            self._live(value, self._released_point(value), -1)

    def _released_point(self, value: int) -> int:
        """First point at which the program holds the value no longer."""
        return self._dataflow.span_end(self._dataflow.profile.values[value].release) + 1

    def do(self, action: Action) -> None:
        if action.slot != self._slot:
            self._close_entry()
            self._slot = action.slot
        kind = action.kind
        self._leading = self._leading and kind in LEADING
        if kind == "replay":
            self._replay(action)
        elif kind == "drop":
            self._drop(action.target)
        elif kind in ("free", "empty"):
            self._free(action.target)
        elif kind == "refill":
            self._refill(action.target)
        elif kind == "copy_in":
            self._arrive(action.target)

    def finish(self) -> Occupancy:
        self._close_entry()
        change = numpy.cumsum(numpy.array(self._change[:-1], dtype=numpy.int64))
        points = self._dataflow.in_core_points + change
        for slot, excess in self._entry_excess.items():
            points[2 * slot] += excess
        in_flight, resident_bytes = self._dataflow.profile.in_flight, 0
        if in_flight.microbatches > 1:
            resident_bytes = in_flight.resident_bytes + int(change[2 * self._turn]) - self._acted_at_turn
            points += others_change(self._dataflow, resident_bytes)
        return Occupancy(points, self._entry_excess, resident_bytes)

    def _close_entry(self) -> None:
        if self._high > self._level:
            self._entry_excess[self._slot] = self._high - self._level
        self._level = self._high = 0
        self._leading = True

    def _live(self, value: int, point: int, sign: int) -> None:
        """From `point` to its death in-core the value is there again (+1) or is not (-1)."""
        end = self._life_ends[value]
        if point < end:
            if self._slot == self._turn and point == 2 * self._turn:
                self._acted_at_turn += sign * self._allocated[value]
            self._change[point] += sign * self._allocated[value]
            self._change[end] -= sign * self._allocated[value]

    def _rise(self, number_bytes: int) -> None:
        self._level += number_bytes
        if self._level > self._high:
            self._high = self._level

    def _arrive(self, value: int) -> None:
        self._arrived[value] = 2 * self._slot
        self._live(value, 2 * self._slot, +1)
        self._rise(self._allocated[value])

    def _refill(self, value: int) -> None:
        self._emptied.discard(value)
        self._live(value, 2 * self._slot, +1)
        self._rise(self._allocated[value])

    def _free(self, value: int) -> None:
        if value in self._emptied:
            return  # its bytes went before
        self._emptied.add(value)
        self._live(value, 2 * self._slot, -1)
        if value in self._recomputed:  # that it would leave at its release is counted already
            self._live(value, self._released_point(value), +1)
        self._level -= self._allocated[value]
        if self._leading:
            self._high = self._level

    def _replay(self, action: Action) -> None:
        reused = sum(self._allocated[value] for value in action.in_place)
        peak = self._level + self._dataflow.replay_room_bytes[action.target] - reused
        self._high = max(self._high, peak)
        self._level -= reused
        self._transient.difference_update(action.in_place)
        for value in action.outputs:
            if value in self._recomputed:
                self._arrive(value)
            else:
                self._transient.add(value)
                self._rise(self._allocated[value])

    def _drop(self, value: int) -> None:
        """Ends the schedule's hold; in between, it kept alive what autograd had let go of."""
        number_bytes, point = self._allocated[value], 2 * self._slot
        if value in self._transient:
            self._transient.discard(value)
            self._level -= number_bytes
        elif point >= self._life_ends[value]:
            self._change[max(self._life_ends[value], self._arrived.get(value, 0))] += number_bytes
            self._change[point] -= number_bytes
            if point == 2 * self._turn:
                self._acted_at_turn -= number_bytes
            self._level -= number_bytes
