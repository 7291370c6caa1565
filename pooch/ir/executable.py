"""Checks of a plan without the profile that it was made from.

The verifier in `schedule` needs the profile. The executor has only the plan, which may come from a file that somebody
changed. So its numbers have to be sane, what it expects has to be one step, and its schedule has to be one that can be
followed (`schedule_check.py`). The runtime refuses a replay if it does not hold the values that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..ground.errors import InvalidLayout, InvalidSchedule, PlanMismatch
from .consistency import anchor_faults, are_bytes, is_time, split_faults
from .files import fault_of
from .layout_check import verify as verify_layout
from .plan import Decision, Plan
from .schedule_check import Frame, follow

_MOST_SLOTS = 1 << 32


def check_executable(plan: Plan) -> None:
    """Refuse a plan that cannot be executed.

    Raises:
        InvalidSchedule: names the first fault.
        PlanMismatch: nobody knows whether a call in slices has the bits of the plain one.
    """
    fault = check_plan(plan)
    if fault is not None:
        raise InvalidSchedule(f"the plan cannot be executed ({fault}): make it again with `pooch plan`")
    if not all(split.compared for split in plan.splits):
        raise PlanMismatch(
            "the plan runs the loss in slices, and was made for a modelled device, on which the bits of both ways "
            "could not be compared: profile on this device, and plan again"
        )


@fault_of.register
def check_plan(plan: Plan) -> str | None:
    """The first fault of a plan, or None."""
    return next(_plan_faults(plan), None)


def _plan_faults(plan: Plan) -> Iterator[str]:
    yield from _number_faults(plan)
    for decision in plan.choices:
        yield from _decision_faults(decision)
    yield from _frame_faults(plan)
    yield from split_faults(plan.splits)
    if not all(plan.first_slot <= split.op < plan.first_slot + len(plan.expected) for split in plan.splits):
        yield "a split names an op outside of the region"
    yield from _layout_faults(plan)
    yield from _schedule_faults(plan)
    yield from _persistent_faults(plan)


def _number_faults(plan: Plan) -> Iterator[str]:
    schedule = plan.schedule
    peaks = (plan.budget_bytes, plan.predicted_peak_bytes, plan.in_core_peak_bytes, plan.persistent_bytes)
    if not are_bytes(*peaks, schedule.host_bytes):
        yield "its budget, a peak or its room in the tier is negative or too large"
    if plan.microbatches_in_flight < 1:
        yield f"it is for {plan.microbatches_in_flight} microbatches in flight"
    times_ms = (plan.predicted_step_ms, plan.in_core_step_ms, plan.lower_bound_ms, plan.planning_ms)
    if not all(map(is_time, times_ms)):
        yield f"its times are {times_ms} ms"
    if not 0 <= plan.gap <= 1:
        yield f"its gap is {plan.gap}"


def _decision_faults(decision: Decision) -> Iterator[str]:
    if decision.value < 0:
        yield "a decision names a negative value"
    if not are_bytes(decision.size_bytes):
        yield f"value {decision.value} has {decision.size_bytes} bytes"
    if not is_time(decision.copy_ms) or not (math.isnan(decision.replay_ms) or is_time(decision.replay_ms)):
        yield f"value {decision.value} takes {decision.copy_ms} ms to copy and {decision.replay_ms} ms to replay"
    changes_ms = (decision.keep_change_ms, decision.swap_change_ms, decision.recompute_change_ms)
    if any(change_ms is not None and math.isnan(change_ms) for change_ms in changes_ms):
        yield f"other choices for value {decision.value} change the step by {changes_ms} ms"


def _frame_faults(plan: Plan) -> Iterator[str]:
    """Faults of the expected ops, of what they write, and of where the backward pass first reads it."""
    if not 0 <= plan.first_slot < _MOST_SLOTS or (plan.region == "step" and plan.first_slot):
        yield f"its first slot is {plan.first_slot}, for the region {plan.region!r}"
    written = [value for op in plan.expected for value in op.writes]
    made = {value for value in written if value >= 0}
    if any(value < -1 for value in written) or len(made) != sum(value >= 0 for value in written):
        yield "a value is written by two of its ops, or is negative"
    yield from anchor_faults(plan.anchors, plan.first_slot + len(plan.expected), _MOST_SLOTS)
    if not made.issuperset(value for _, values in plan.anchors for value in values):
        yield "an anchor names a value that none of its ops makes"
    if len(plan.decisions) != len(plan.choices):
        yield "an activation is decided on twice"
    if not made.issuperset(decision.value for decision in plan.choices):
        yield "a decision names a value that none of its ops makes"
    moved = {*plan.decisions, *plan.schedule.sources}
    if not moved.isdisjoint(plan.gathered) or any(value < 0 for value in plan.gathered):
        yield "a value that it decides on or holds is said to be gathered by FSDP"
    if not set(plan.from_gathered) <= set(plan.schedule.recomputed):
        yield "a value that is not recomputed is said to be made from what FSDP gathers"


def _schedule_faults(plan: Plan) -> Iterator[str]:
    """The schedule can be followed with the region's ops, and swaps what the rows have room for in the tier."""
    frame = Frame(
        plan.first_slot,
        [op.writes for op in plan.expected],
        plan.anchors,
        plan.decisions,
        {decision.value: decision.size_bytes for decision in plan.choices},
        frozenset(plan.from_gathered),
    )
    try:
        follow(plan.schedule, frame)
    except InvalidSchedule as error:
        yield str(error)


def _layout_faults(plan: Plan) -> Iterator[str]:
    """The layout holds, is that of a step with the plan's peak, and fits into a budget that bounds the arena."""
    found = plan.layout
    if found is None:
        if plan.bound == "arena":
            yield "its budget bounds the arena, but it has no layout"
        return
    if not are_bytes(found.outside_bytes, found.arena_bytes, found.bound_bytes):
        yield "the bytes of its layout are negative or too large"
        return
    for block in found.blocks:
        if not 0 <= block.lower < block.upper < _MOST_SLOTS or not are_bytes(block.size_bytes):
            yield f"block {block.kind} {block.target} of its layout has no size or lifetime"
            return
        if not 1 <= block.alignment_bytes <= _MOST_SLOTS:
            yield f"block {block.kind} {block.target} of its layout is aligned to {block.alignment_bytes} bytes"
            return
    try:
        verify_layout([block.block for block in found.blocks], found.layout)
    except InvalidLayout as error:
        yield f"in its layout, {error}"
    if found.outside_bytes + found.bound_bytes != plan.predicted_peak_bytes:
        yield "its layout is for another peak"
    if plan.bound == "arena" and plan.budget_bytes and found.total_bytes > plan.budget_bytes:
        yield f"its arena takes {found.total_bytes} bytes, over the budget of {plan.budget_bytes}"


def _persistent_faults(plan: Plan) -> Iterator[str]:
    """What outlives the step leaves and comes back at positions that there may be."""
    found = plan.persistent
    if found is None:
        return
    figures = (
        found.staying_bytes,
        found.allowance_bytes,
        found.copied_out_bytes,
        found.copied_in_bytes,
        found.tier_bytes,
    )
    if not are_bytes(*figures) or not is_time(found.optimizer_ms):
        yield "what it says of what outlives the step is negative or too large"
    if len({(move.name, move.kind) for move in found.moves}) != len(found.moves):
        yield "a tensor that outlives the step leaves twice"
    for move in found.moves:
        if not are_bytes(move.size_bytes) or move.copies_out not in (0, 1):
            yield f"the {move.kind} of {move.name!r} has a size or copies that there cannot be"
        if any(not 0 <= leaves < _MOST_SLOTS or not -1 <= back < _MOST_SLOTS for leaves, back, _ in move.away):
            yield f"the {move.kind} of {move.name!r} leaves at a position that there cannot be"
        if any(not -1 <= need < _MOST_SLOTS or (back < 0) != (need < 0) for _, back, need in move.away):
            yield f"the {move.kind} of {move.name!r} comes back at a position that there cannot be"
