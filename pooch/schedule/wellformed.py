"""Checks that need no walk over the schedule: its lists, slots and host layout."""

from __future__ import annotations

from typing import NoReturn

from ..analysis.dataflow import Dataflow
from ..errors import InvalidSchedule
from ..ir import Action, Decisions, Schedule
from ..ir.executable import tier_overlaps

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
    offsets = dict(schedule.host_offsets)
    sizes = {value: dataflow.profile.values[value].size_bytes for value in offsets}
    for fault in tier_overlaps(schedule.actions, offsets, sizes):
        _refuse(fault)
    for value, offset in offsets.items():
        past_the_end = offset + sizes[value] - schedule.host_bytes
        if past_the_end > 0:
            _refuse(f"value {value} ends {past_the_end} bytes past the end of the tier")


def _refuse(fault: str) -> NoReturn:
    raise InvalidSchedule(fault)
