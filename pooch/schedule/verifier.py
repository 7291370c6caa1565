"""Walks a schedule symbolically, and refuses one that would fault, leak or exceed the budget.

It is independent of the lowering: it keeps its own ledger and counts bytes by itself. Whether each action finds its
value in the state that it needs can be told without the profile, and is checked where plans are
(`ir/schedule_check.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from ..analysis.dataflow import Dataflow
from ..ground.errors import InvalidSchedule
from ..ir import Action, Decisions, Schedule, Value
from ..ir.schedule_check import Frame, Walk, check_form
from .ledger import SCHEDULE, STEP, Ledger


def verify(dataflow: Dataflow, schedule: Schedule, decisions: Decisions, budget_bytes: int | None) -> list[int]:
    """Check that a schedule can be executed, moves nothing but what was decided on, and keeps the budget, if any.

    Returns:
        Live bytes at each point (two per slot), by the verifier's own count.

    Raises:
        InvalidSchedule: the schedule cannot be executed; gives the slot and the fault.
    """
    _check_values(dataflow, schedule)
    frame = _frame(dataflow, decisions)
    check_form(schedule, frame)
    return _Verifier(dataflow, schedule, Walk(schedule, frame), budget_bytes).walk()


def _check_values(dataflow: Dataflow, schedule: Schedule) -> None:
    """Check that nothing but activations moves, and that what moves or is held for replays is not overwritten."""
    values = dataflow.profile.values
    for choice, moved in (("swap", schedule.swapped), ("recompute", schedule.recomputed)):
        for value in moved:
            if value not in dataflow.activation_ids:
                raise InvalidSchedule(f"{choice} of value {value}, which is not an activation")
            if values[value].overwritten_at >= 0:
                raise InvalidSchedule(f"{choice} of value {value}, which is overwritten in the step")
    for source in schedule.sources:
        if not 0 <= source < len(values) or values[source].overwritten_at >= 0:
            raise InvalidSchedule(f"value {source} cannot be held as a source")


def _frame(dataflow: Dataflow, decisions: Decisions) -> Frame:
    return Frame(
        dataflow.forward_slots.start,
        [dataflow.profile.ops[slot].writes for slot in dataflow.forward_slots],
        dataflow.anchors,
        decisions,
        {value.id: value.size_bytes for value in dataflow.activations},
        dataflow.from_gathered,
    )


class _Verifier:
    """The step beside the walk over the schedule: who holds what, what looks at it, and the bytes that it takes."""

    def __init__(self, dataflow: Dataflow, schedule: Schedule, moves: Walk, budget_bytes: int | None) -> None:
        self._dataflow = dataflow
        self._profile = dataflow.profile
        self._budget_bytes = budget_bytes
        self._moves = moves
        self._ledger = Ledger(dataflow)
        self._sources = frozenset(schedule.sources)
        self._recomputed = frozenset(schedule.recomputed)
        self._swapped = frozenset(schedule.swapped)
        self._dropped = frozenset(action.target for action in schedule.actions if action.kind == "drop")
        self._looks = _looks_by_slot(dataflow)
        self._actions: dict[int, list[Action]] = defaultdict(list)
        for action in schedule.actions:
            self._actions[action.slot].append(action)
        self._leaving: dict[int, list[int]] = defaultdict(list)  # slot -> values that the step releases in it
        for value in self._profile.values:
            self._leaving[value.death].append(value.id)
            if value.id in self._recomputed:
                self._leaving[value.release].append(value.id)
        self._points: list[int] = []
        self._resident_bytes = 0  # what this microbatch holds between its two passes

    def walk(self) -> list[int]:
        for slot in range(self._dataflow.end):
            if slot == self._profile.forward_ops:
                self._resident_bytes = self._held_between_passes(slot)
            self._entry(slot)
            self._check_looks(slot)
            self._births(slot)
            self._points.append(self._base(2 * slot + 1) + self._ledger.extra_bytes)
            self._deaths(slot)
            if slot == self._dataflow.forward_slots.stop - 1:
                self._check_end_of_region(slot)
        self._moves.end()
        self._count_others()
        self._check_budget()
        return self._points

    def _held_between_passes(self, slot: int) -> int:
        """Bytes of this microbatch at the end of its forward pass, the others being in the base bytes."""
        in_flight = self._profile.in_flight
        others = in_flight.others_bytes(in_flight.resident_bytes, self._profile.missing_gradients()[slot])
        return self._base(2 * slot) - others + self._ledger.extra_bytes - self._profile.persistent_bytes

    def _count_others(self) -> None:
        """Count what the other microbatches hold; the base bytes have them keep everything."""
        in_flight = self._profile.in_flight
        if in_flight.microbatches == 1:
            return
        for slot, missing in enumerate(self._profile.missing_gradients()):
            kept = in_flight.others_bytes(in_flight.resident_bytes, missing)
            held = in_flight.others_bytes(self._resident_bytes, missing)
            self._points[2 * slot] += held - kept
            self._points[2 * slot + 1] += held - kept

    def _check_budget(self) -> None:
        for point, live_bytes in enumerate(self._points):
            if self._budget_bytes is not None and live_bytes > self._budget_bytes:
                part = "body" if point % 2 else "entry"
                self._refuse(point // 2, f"{part} takes {live_bytes} bytes, over the budget of {self._budget_bytes}")

    def _entry(self, slot: int) -> None:
        """Perform the actions of an entry; its bytes count from after the leading copies out and frees."""
        actions = self._actions[slot]
        leading = 0
        while leading < len(actions) and actions[leading].kind in ("copy_out", "free", "empty"):
            self._do(actions[leading])
            leading += 1
        highest = self._ledger.extra_bytes
        for action in actions[leading:]:
            highest = max(highest, self._do(action), self._ledger.extra_bytes)
        self._moves.leave_entry(slot)
        self._points.append(self._base(2 * slot) + highest)

    def _do(self, action: Action) -> int:
        """Perform one action, and return the extra bytes at its peak."""
        slot, value = action.slot, action.target
        was_emptied = self._moves.state.get(value) == "emptied"
        intermediates = frozenset(self._moves.intermediates)
        self._moves.do(action)
        match action.kind:
            case "replay":
                return self._replay(action, intermediates)
            case "copy_out":
                if not self._ledger.holds(value, STEP):
                    self._refuse(slot, f"copy out of value {value}, which is not on the device")
            case "free":
                self._free(slot, self._profile.values[value], was_emptied)
            case "empty":
                self._empty(slot, self._profile.values[value])
            case "refill":
                if self._profile.values[value].release < slot:
                    self._refuse(slot, f"refill of value {value}, which the program no longer holds")
                self._ledger.refill(value)
            case "copy_in":
                self._bring(slot, value)
            case "drop" if value in intermediates:
                self._ledger.remove_intermediate(value)
            case "drop":
                self._ledger.let_go(value, SCHEDULE)
        return self._ledger.extra_bytes

    def _free(self, slot: int, value: Value, was_emptied: bool) -> None:
        if value.release >= slot:
            self._refuse(slot, f"free of value {value.id}, which the program holds through slot {value.release}")
        if was_emptied:
            self._ledger.forget(value.id)
            return
        if not self._ledger.holds(value.id, STEP):
            self._refuse(slot, f"free of value {value.id} after its death in slot {value.death}")
        self._ledger.let_go(value.id, STEP)

    def _empty(self, slot: int, value: Value) -> None:
        """Empty a value. All of its reads must be seen until it is back or the program releases it."""
        if not self._dataflow.can_empty(value):
            self._refuse(slot, f"empty of value {value.id}, which may be read or overwritten unseen")
        if not self._ledger.holds(value.id, STEP) or value.release < slot:
            self._refuse(slot, f"empty of value {value.id}, which the program does not hold")
        self._ledger.empty(value.id)

    def _bring(self, slot: int, value: int) -> None:
        """Allocate the value again: for autograd until its death, and for replays until its drop."""
        if self._profile.values[value].death >= slot:
            self._ledger.hold(value, STEP)
        if value in self._dropped:
            self._ledger.hold(value, SCHEDULE)
        if not self._ledger.is_resident(value):
            self._refuse(slot, f"value {value} comes back after its death, when nothing reads it")

    def _replay(self, action: Action, intermediates: frozenset[int]) -> int:
        op = self._profile.ops[action.target]
        if op.refusal is not None:
            self._refuse(action.slot, f"replay of op {op.index}: {op.refusal}")
        for value in op.reads:
            if value not in intermediates:
                self._check_read(action, value)
        ledger = self._ledger
        written = sum(self._profile.values[value].allocated_bytes for value in op.writes)
        workspace = self._dataflow.replay_extra_bytes(op.index)
        for value in action.in_place:
            self._check_in_place(action, value)
            ledger.remove_intermediate(value)
        peak = ledger.extra_bytes + written + workspace
        for value in action.outputs:
            self._keep_output(action, value)
        return peak

    def _check_read(self, action: Action, value: int) -> None:
        """A replay can read what the schedule holds, what came back, and what is always available."""
        if self._dataflow.is_always_at_hand(self._profile.values[value]):
            return
        where = f"replay of op {action.target} reads value {value}"
        gathering = self._dataflow.gathering
        if gathering.is_gathered(value):
            if not gathering.is_there(value, gathering.at(action.slot)):
                self._refuse(action.slot, f"{where}, which FSDP has not gathered there")
            return
        if value in self._sources:
            if not self._ledger.holds(value, SCHEDULE):
                self._refuse(action.slot, f"{where}, which was dropped before")
        elif value in self._recomputed:
            if self._moves.state[value] != "back" or not self._ledger.is_resident(value):
                self._refuse(action.slot, f"{where}, which is recomputed but not on the device")
        elif value in self._swapped:
            if self._moves.state[value] != "back" or not self._ledger.is_resident(value):
                self._refuse(action.slot, f"{where}, which is swapped and not back, or not waited for")
        else:
            self._refuse(action.slot, f"{where}, which is neither held as a source nor brought back")

    def _check_in_place(self, action: Action, value: int) -> None:
        op = self._profile.ops[action.target]
        taken_over = [i for i in op.writes if self._profile.values[i].overwrites == value]
        if value not in op.reads or not taken_over:
            self._refuse(action.slot, f"replay of op {op.index} may not overwrite value {value}")

    def _keep_output(self, action: Action, value: int) -> None:
        if value not in self._recomputed:
            self._ledger.add_intermediate(value)
            return
        if self._profile.values[value].release >= action.slot:
            self._refuse(action.slot, f"value {value} is recomputed while it is still on the device")
        self._bring(action.slot, value)

    def _check_looks(self, slot: int) -> None:
        """Check that what the forward pass reads or touches in this slot is on the device."""
        for value in self._looks.get(slot, ()):
            if self._moves.state.get(value) == "filling" or self._ledger.is_empty(value):
                self._refuse(slot, f"the forward pass uses value {value}, which is emptied or being refilled")

    def _check_end_of_region(self, slot: int) -> None:
        """Check what the program holds: reads are not seen after the region, so it has to be on the device."""
        filling = [value for value, state in self._moves.state.items() if state == "filling"]
        for value in [*filling, *self._ledger.emptied()]:
            if self._profile.values[value].release >= slot:
                self._refuse(slot, f"value {value} is not back when the region ends, but the program still holds it")

    def _births(self, slot: int) -> None:
        for value in self._profile.ops[slot].writes:
            self._ledger.hold(value, STEP)
            if value in self._sources:
                self._ledger.hold(value, SCHEDULE)

    def _deaths(self, slot: int) -> None:
        for value in self._leaving[slot]:
            # For a replayed value, the release by the program is in the past.
            if self._profile.values[value].death == slot or self._moves.state.get(value) != "back":
                self._ledger.let_go(value, STEP)
                if value in self._recomputed:
                    self._ledger.forget(value)

    def _base(self, point: int) -> int:
        return int(self._dataflow.base_points[point])

    def _refuse(self, slot: int, fault: str) -> NoReturn:
        raise InvalidSchedule(f"slot {slot}: {fault}")


def _looks_by_slot(dataflow: Dataflow) -> dict[int, list[int]]:
    """Return the values that the forward pass reads or touches, by slot."""
    profile = dataflow.profile
    looks: dict[int, list[int]] = defaultdict(list)
    for op in profile.ops[: profile.forward_ops]:
        looks[op.index] += op.reads
    for value in profile.values:
        for slot in value.touches or ():
            looks[slot].append(value.id)
    return looks
