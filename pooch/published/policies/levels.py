"""Levels of the graph, by which TFLMS measures distances: the longest path from the input to an op."""

from __future__ import annotations

from dataclasses import replace

from ...analysis.dataflow import Dataflow
from ...ir.schedule import Action, Schedule
from .timing import Trip, only_moved


def forward_levels(dataflow: Dataflow) -> list[int]:
    """By forward op: its level. Ops that read nothing that the step makes are at level 0."""
    values, levels = dataflow.profile.values, list[int]()
    for op in dataflow.profile.ops[: dataflow.profile.forward_ops]:
        producers = (values[value].producer for value in op.reads)
        levels.append(1 + max((levels[made] for made in producers if 0 <= made < op.index), default=-1))
    return levels


class ChainRule:
    """Walks along the forward pass from a value to an op whose gradient triggers the copy in.

    Args:
        dataflow: of the step.
        lb: least number of levels from the value to that op.
        ub: most levels.
    """

    def __init__(self, dataflow: Dataflow, lb: int, ub: int) -> None:
        self._dataflow = dataflow
        self._distances = range(lb, ub + 1)
        self._levels = forward_levels(dataflow)

    def __call__(self, trip: Trip) -> int:
        """Return where the gradient of the nearest such op runs, which is where what the op made is first read.

        Without such an op, the copy starts when the value is needed.
        """
        values, levels = self._dataflow.profile.values, self._levels
        start = values[trip.value].producer
        slots_by_level: dict[int, int] = {}
        for value in self._downstream(start):
            distance, slot = levels[values[value].producer] - levels[start], values[value].first_unpack
            if distance in self._distances and 0 <= slot < trip.need_slot:
                slots_by_level[distance] = max(slot, slots_by_level.get(distance, -1))
        return slots_by_level[min(slots_by_level)] if slots_by_level else trip.need_slot

    def _downstream(self, start: int) -> list[int]:
        """Return the activations that are made from what an op makes."""
        reached, ops = set(self._dataflow.profile.ops[start].writes), self._dataflow.profile.ops
        for op in ops[start + 1 : self._dataflow.profile.forward_ops]:
            if not reached.isdisjoint(op.reads):
                reached.update(op.writes)
        return [value.id for value in self._dataflow.activations if value.id in reached and value.producer != start]


def without_branches(dataflow: Dataflow, schedule: Schedule, threshold: int | None) -> Schedule:
    """Return the schedule without swaps between two reads of the forward pass.

    Args:
        dataflow: of the step.
        schedule: of swaps.
        threshold: swaps between reads more than this many levels apart stay. None: none stays.
    """
    levels, dropped = forward_levels(dataflow), set[int]()
    emptied: dict[int, int] = {}  # value -> place of the action that emptied it
    filling: dict[int, tuple[int, int]] = {}  # value -> places of the two actions of the gap that is being closed
    for place, action in enumerate(schedule.actions):
        if action.kind == "empty":
            emptied[action.target] = place
        elif action.kind == "refill":
            filling[action.target] = emptied.pop(action.target), place
        elif action.kind == "wait" and action.target in filling:
            first, second = filling.pop(action.target)
            away_level = levels[schedule.actions[first].slot - 1]
            if threshold is None or levels[min(action.slot, len(levels) - 1)] - away_level <= threshold:
                dropped |= {first, second, place}
    return _without(dataflow, schedule, dropped) if dropped else schedule


def _without(dataflow: Dataflow, schedule: Schedule, dropped: set[int]) -> Schedule:
    """Return the schedule without these actions, and without copies out of what then never leaves."""
    actions = [action for place, action in enumerate(schedule.actions) if place not in dropped]
    leaving = {action.target for action in actions if action.kind in ("free", "empty")}
    kept: list[Action] = [a for a in actions if a.kind != "copy_out" or a.target in leaving]
    return only_moved(dataflow, replace(schedule, actions=tuple(kept)))
