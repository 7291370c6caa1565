"""Checks of a plan without the profile that it was made from.

The verifier in `schedule` needs the profile. The executor has only the plan, which may come from a file that somebody
changed. So each action has to find its value in the state that it needs, each value has to be present when the backward
pass first reads it, and no two values may share room in the tier at the same time. What a replay reads is only in the
profile; the runtime refuses a replay if it does not hold the values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ..errors import InvalidLayout, InvalidSchedule
from ..units import round_up
from .consistency import anchor_faults, are_bytes, is_time, split_faults
from .files import fault_of
from .layout_check import verify as verify_layout
from .plan import Decision, Plan
from .schedule import TIER_ALIGNMENT_BYTES, Action

_FORWARD_KINDS = frozenset(("copy_out", "free", "empty", "refill", "wait"))
_BACKWARD_KINDS = frozenset(("copy_out", "free", "copy_in", "wait", "replay", "drop"))
_MOST_SLOTS = 1 << 32
_NEVER = 1 << 60

# State of a swapped value after an action, by its state before it.
_MOVES = {
    "copy_out": {"here": "copied"},
    "free": {"copied": "away", "emptied": "away"},
    "empty": {"copied": "emptied"},
    "refill": {"emptied": "filling"},
    "copy_in": {"away": "arriving"},
    "wait": {"filling": "copied", "arriving": "back"},
}


def check_executable(plan: Plan) -> None:
    """Refuse a plan that cannot be executed.

    Raises:
        InvalidSchedule: names the first fault.
    """
    fault = check_plan(plan)
    if fault is not None:
        raise InvalidSchedule(f"the plan cannot be executed ({fault}): make it again with `pooch plan`")


@fault_of.register
def check_plan(plan: Plan) -> str | None:
    """The first fault of a plan, or None."""
    return next(_plan_faults(plan), None)


def _plan_faults(plan: Plan) -> Iterator[str]:
    yield from _number_faults(plan)
    for decision in plan.choices:
        yield from _decision_faults(decision)
    yield from _frame_faults(plan)
    yield from _list_faults(plan)
    yield from split_faults(plan.splits)
    if not all(plan.first_slot <= split.op < plan.first_slot + len(plan.expected) for split in plan.splits):
        yield "a split names an op outside of the region"
    yield from _slot_faults(plan)
    yield from _tier_faults(plan)
    yield from _layout_faults(plan)
    yield from _Walk(plan).faults()


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
    if not made.issuperset(decision.value for decision in plan.choices):
        yield "a decision names a value that none of its ops makes"
    moved = {*plan.decisions, *plan.schedule.sources}
    if not moved.isdisjoint(plan.gathered) or any(value < 0 for value in plan.gathered):
        yield "a value that it decides on or holds is said to be gathered by FSDP"
    if not set(plan.from_gathered) <= set(plan.schedule.recomputed):
        yield "a value that is not recomputed is said to be made from what FSDP gathers"


def _list_faults(plan: Plan) -> Iterator[str]:
    """Every value that moves has a decision, and no value that is held for replays leaves."""
    schedule, decisions = plan.schedule, plan.decisions
    if len(decisions) != len(plan.choices):
        yield "an activation is decided on twice"
    for choice, moved in (("swap", schedule.swapped), ("recompute", schedule.recomputed)):
        if len(set(moved)) != len(moved):
            yield f"a value is listed twice for {choice}"
        for value in moved:
            if decisions.get(value) != choice:
                yield f"{choice} of value {value}, for which {decisions.get(value, 'nothing')!r} was decided"
    made = {value for op in plan.expected for value in op.writes}
    gone = {*schedule.recomputed, *(action.target for action in schedule.actions if action.kind == "free")}
    if len(set(schedule.sources)) != len(schedule.sources):
        yield "a source is listed twice"
    for source in schedule.sources:
        if source < 0 or source not in made or source in gone:
            yield f"value {source} cannot be held as a source"


def _slot_faults(plan: Plan) -> Iterator[str]:
    """Actions are in order, at slots where the runtime can act."""
    region = range(plan.first_slot, plan.first_slot + len(plan.expected))
    anchors = {slot for slot, _ in plan.anchors}
    last = 0
    for action in plan.schedule.actions:
        if action.target < 0:
            yield "an action names a negative target"
        if action.slot < last:
            yield "its actions are not in ascending order of slots"
        in_forward = action.slot in region and action.kind in _FORWARD_KINDS
        in_backward = action.slot in anchors and action.kind in _BACKWARD_KINDS
        if not (in_forward or in_backward):
            yield f"{action.kind} of {action.target} is at slot {action.slot}, where no schedule can act"
        last = action.slot


def _tier_faults(plan: Plan) -> Iterator[str]:
    """Every swapped value has room of its own in the tier, from its copy out until its last copy back."""
    schedule = plan.schedule
    offsets = dict(schedule.host_offsets)
    if len(offsets) != len(schedule.host_offsets) or offsets.keys() != set(schedule.swapped):
        yield "the tier's layout is not that of the swapped values"
        return
    sizes = {decision.value: round_up(decision.size_bytes, TIER_ALIGNMENT_BYTES) for decision in plan.choices}
    for value, offset in schedule.host_offsets:
        if offset < 0 or offset + sizes[value] > schedule.host_bytes:
            yield f"value {value} lies outside the tier"
        if offset % TIER_ALIGNMENT_BYTES:
            yield f"value {value} lies at {offset} in the tier, which is no multiple of {TIER_ALIGNMENT_BYTES}"
    if schedule.host_bytes > sum(sizes[value] for value in offsets):
        yield f"the tier has {schedule.host_bytes} bytes, more than the swapped values take"
    yield from tier_overlaps(schedule.actions, offsets, sizes)


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


def tier_overlaps(actions: Sequence[Action], offsets: dict[int, int], sizes: dict[int, int]) -> Iterator[str]:
    """Rooms that two values share at the same time. A room is free after the slot of its value's last wait."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for action in actions:
        if action.kind in _MOVES and action.target in offsets:
            first.setdefault(action.target, action.slot)
            last[action.target] = action.slot if action.kind == "wait" else _NEVER
    taken: list[tuple[int, int, int]] = []  # begin, end and value of the rooms in use, ascending
    for value in sorted(first, key=lambda value: first[value]):
        taken = [room for room in taken if last[room[2]] >= first[value]]
        room = (offsets[value], offsets[value] + sizes[value], value)
        place = bisect_left(taken, room)
        for begin, end, other in taken[max(0, place - 1) : place + 1]:
            if begin < room[1] and room[0] < end:
                yield f"values {min(value, other)} and {max(value, other)} overlap in the tier"
        taken.insert(place, room)


class _Walk:
    """Follows the actions in order and tracks where each value is and what the schedule holds for replays."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made_at = {v: plan.first_slot + i for i, op in enumerate(plan.expected) for v in op.writes if v >= 0}
        self._unpacked_at = {value: slot for slot, values in plan.anchors for value in values}
        self._swapped, self._recomputed = frozenset(plan.schedule.swapped), frozenset(plan.schedule.recomputed)
        self._state = dict.fromkeys((*plan.schedule.swapped, *plan.schedule.recomputed), "here")
        self._refilled: set[int] = set()
        self._held = set(plan.schedule.sources)
        self._dropped = frozenset(action.target for action in plan.schedule.actions if action.kind == "drop")
        self._intermediates: set[int] = set()

    def faults(self) -> Iterator[str]:
        """The faults, in order."""
        entries: dict[int, list[Action]] = {slot: [] for slot, _ in self._plan.anchors}
        for action in self._plan.schedule.actions:
            entries.setdefault(action.slot, []).append(action)
        unpacks = dict(self._plan.anchors)
        for slot in sorted(entries):
            for action in entries[slot]:
                yield from self._do(action)
            if self._intermediates:
                yield f"slot {slot}: replayed intermediate {min(self._intermediates)} is not dropped"
            yield from self._unpack(slot, unpacks.get(slot, ()))
        yield from self._end()

    def _do(self, action: Action) -> Iterator[str]:
        if action.kind == "replay":
            yield from self._replay(action)
        elif action.kind == "drop":
            yield from self._drop(action)
        elif action.target in self._swapped:
            yield from self._move(action)
        elif action.kind == "empty" and action.target in self._recomputed:
            if self._state[action.target] != "here" or self._made_at[action.target] >= action.slot:
                yield f"slot {action.slot}: empty of value {action.target}, which is not present"
            if action.target in self._plan.from_gathered:
                yield f"slot {action.slot}: empty of value {action.target}, which cannot be made again at any time"
            self._state[action.target] = "emptied"
        else:
            yield f"slot {action.slot}: {action.kind} of value {action.target}, which is not swapped"

    def _move(self, action: Action) -> Iterator[str]:
        value = action.target
        before = self._state[value] if self._made_at[value] < action.slot else "not made"
        after = _MOVES[action.kind].get(before)
        if after is None:
            yield f"slot {action.slot}: {action.kind} of value {value}, which is {before} by then"
            return
        if action.kind == "free" and 0 <= self._unpacked_at.get(value, -1) < action.slot:
            yield f"slot {action.slot}: free of value {value} after its first unpack"
        if action.kind == "refill":
            self._refilled.add(value)
        self._arrive(value, after)

    def _arrive(self, value: int, state: str) -> None:
        self._state[value] = state
        if value in self._dropped and state in ("arriving", "back"):
            self._held.add(value)

    def _replay(self, action: Action) -> Iterator[str]:
        where = f"slot {action.slot}: replay of op {action.target}"
        position = action.target - self._plan.first_slot
        if not 0 <= position < len(self._plan.expected):
            yield f"{where}, which is no op of the region"
            return
        outputs = set(action.outputs)
        if len(outputs) != len(action.outputs) or not outputs <= set(self._plan.expected[position].writes) - {-1}:
            yield f"{where} keeps what it does not write"
        for value in action.in_place:
            if value not in self._intermediates or self._made_at[value] >= action.target:
                yield f"{where} must not overwrite value {value}"
            self._intermediates.discard(value)
        for value in action.outputs:
            yield from self._keep(where, value)

    def _keep(self, where: str, value: int) -> Iterator[str]:
        if value in self._recomputed:
            if self._state[value] == "back":
                yield f"{where} makes value {value} for the second time"
            self._arrive(value, "back")
        elif value in self._swapped or value in self._held or value in self._intermediates:
            yield f"{where} makes value {value}, which is present"
        else:
            self._intermediates.add(value)

    def _drop(self, action: Action) -> Iterator[str]:
        if action.target in self._intermediates:
            self._intermediates.remove(action.target)
        elif action.target in self._held:
            self._held.remove(action.target)
        else:
            yield f"slot {action.slot}: drop of value {action.target}, which the schedule does not hold"

    def _unpack(self, slot: int, values: Sequence[int]) -> Iterator[str]:
        for value in values:
            state = self._state.get(value, "here")
            missing = value in self._recomputed and state != "back"
            if missing or state in ("emptied", "filling", "away", "arriving"):
                yield f"slot {slot}: value {value} is unpacked but not present"

    def _end(self) -> Iterator[str]:
        if self._held:
            yield f"value {min(self._held)} is held for replays and never dropped"
        for value in sorted(self._swapped):
            state = self._state[value]
            if state in ("here", "emptied", "filling") or (state == "copied" and value not in self._refilled):
                yield f"value {value} is swapped and never freed"
