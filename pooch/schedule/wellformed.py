"""Checks that need no walk over the schedule: its lists, slots and host layout."""

from __future__ import annotations

from bisect import bisect_left
from typing import NoReturn

from ..analysis.dataflow import Dataflow
from ..errors import InvalidSchedule
from ..ir import Action, Decisions, Schedule

FORWARD_KINDS = ("copy_out", "free", "empty", "refill", "wait")


def check_form(dataflow: Dataflow, schedule: Schedule, decisions: Decisions) -> None:
    """Check everything that does not depend on the order of actions.

    Raises:
        InvalidSchedule: the check fails; names the fault.
    """
    _check_lists(dataflow, schedule, decisions)
    _check_sources(dataflow, schedule)
    _check_slots(dataflow, schedule)
    for action in schedule.actions:
        _check_target(dataflow, schedule, action)
    _check_host(dataflow, schedule)


def _check_lists(dataflow: Dataflow, schedule: Schedule, decisions: Decisions) -> None:
    """Check that the schedule moves only what was decided."""
    for choice, moved in (("swap", schedule.swapped), ("recompute", schedule.recomputed)):
        for value in moved:
            if value not in dataflow.activation_ids:
                _refuse(f"{choice} of value {value}, which is not an activation")
            if decisions.get(value, "keep") != choice:
                _refuse(f"{choice} of value {value}, for which {decisions.get(value, 'keep')!r} was decided")
            if dataflow.profile.values[value].overwritten_at >= 0:
                _refuse(f"{choice} of value {value}, which is overwritten in the step")


def _check_sources(dataflow: Dataflow, schedule: Schedule) -> None:
    """Check sources: they stay through the backward pass, and nothing overwrites them."""
    moved = {*schedule.recomputed, *(action.target for action in schedule.actions if action.kind == "free")}
    for source in schedule.sources:
        value = dataflow.profile.values[source]
        if source in moved or value.role != "made" or value.overwritten_at >= 0:
            _refuse(f"value {source} cannot be held as a source")


def _check_slots(dataflow: Dataflow, schedule: Schedule) -> None:
    anchors = frozenset(dataflow.anchor_slots)
    last = 0
    for action in schedule.actions:
        in_forward = action.slot in dataflow.forward_slots and action.kind in FORWARD_KINDS
        in_backward = action.slot in anchors and action.kind not in ("empty", "refill")
        if not (in_forward or in_backward):
            _refuse(f"{action.kind} of {action.target} is at slot {action.slot}, where no schedule can act")
        if action.slot < last:
            _refuse(f"{action.kind} of {action.target} at slot {action.slot} comes after an action at slot {last}")
        last = action.slot


def _check_target(dataflow: Dataflow, schedule: Schedule, action: Action) -> None:
    profile = dataflow.profile
    if action.kind == "replay":
        if not 0 <= action.target < profile.forward_ops:
            _refuse(f"slot {action.slot}: replay of op {action.target}, which is not a forward op")
        op = profile.ops[action.target]
        if op.refusal is not None:
            _refuse(f"slot {action.slot}: replay of op {op.index}: {op.refusal}")
        if not set(action.outputs) <= set(op.writes):
            _refuse(f"slot {action.slot}: replay of op {op.index} keeps an output that the op does not write")
    elif action.kind in ("copy_out", "free", "refill", "copy_in", "wait") and action.target not in schedule.swapped:
        _refuse(f"slot {action.slot}: {action.kind} of value {action.target}, which is not swapped")
    elif action.kind == "empty" and action.target not in (*schedule.swapped, *schedule.recomputed):
        _refuse(f"slot {action.slot}: empty of value {action.target}, which nothing brings back")


def _check_host(dataflow: Dataflow, schedule: Schedule) -> None:
    """Check that every swapped value has its own room in the tier from its copy out until it is back for good."""
    if sorted(value for value, _ in schedule.host_offsets) != sorted(schedule.swapped):
        _refuse("host offsets and swapped values differ")
    rooms = {v: (begin, begin + dataflow.profile.values[v].size_bytes) for v, begin in schedule.host_offsets}
    moves = [action for action in schedule.actions if action.kind not in ("replay", "drop")]
    last_move = {action.target: place for place, action in enumerate(moves)}
    taken: list[tuple[int, int, int]] = []  # begin, end and value of rooms in use, ascending
    back: list[tuple[int, int]] = []  # slot of the last wait, and value
    for place, action in enumerate(moves):
        if action.kind == "wait" and last_move[action.target] == place:
            back.append((action.slot, action.target))
        elif action.kind == "copy_out" and (*rooms[action.target], action.target) not in taken:
            for done in [pair for pair in back if pair[0] < action.slot]:
                back.remove(done)
                taken.remove((*rooms[done[1]], done[1]))
            _take_room(schedule, taken, rooms[action.target], action.target)


def _take_room(schedule: Schedule, taken: list[tuple[int, int, int]], room: tuple[int, int], value: int) -> None:
    begin, end = room
    place = bisect_left(taken, (begin, end, value))
    for neighbour in taken[max(0, place - 1) : place + 1]:
        if neighbour[0] < end and begin < neighbour[1]:
            _refuse(f"values {min(value, neighbour[2])} and {max(value, neighbour[2])} overlap in the tier")
    if end > schedule.host_bytes:
        _refuse(f"value {value} ends {end - schedule.host_bytes} bytes past the end of the tier")
    taken.insert(place, (begin, end, value))


def _refuse(fault: str) -> NoReturn:
    raise InvalidSchedule(fault)
