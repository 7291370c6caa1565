"""Whether a schedule can be followed: from a plan alone, or as the beginning of what the verifier checks.

A plan and its profile know the same of what a schedule moves: which op makes a value, where the backward pass first
reads it, and what was decided. So each action has to find its value in the state that it needs, each value has to be
present when the backward pass first reads it, and no two values may share room in the tier at the same time. What a
replay reads, how long values live and what they take is only in the profile; `schedule.verifier` adds that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NoReturn

from ..ground.errors import InvalidSchedule
from ..ground.units import round_up
from .schedule import TIER_ALIGNMENT_BYTES, Action, Schedule

_FORWARD_KINDS = frozenset(("copy_out", "free", "empty", "refill", "wait"))
_BACKWARD_KINDS = frozenset(("copy_out", "free", "copy_in", "wait", "replay", "drop"))
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


@dataclass(frozen=True, slots=True)
class Frame:
    """What a schedule has to fit into.

    Attributes:
        first_slot: slot of the region's first op.
        writes: ids of the values that each op of the region makes; -1 for others.
        anchors: (slot, value ids) as in the profile.
        decisions: the choice for each activation.
        size_bytes: of each activation.
        from_gathered: recomputed values that cannot be made again at any time.
    """

    first_slot: int
    writes: Sequence[Sequence[int]]
    anchors: Sequence[tuple[int, tuple[int, ...]]]
    decisions: Mapping[int, str]
    size_bytes: Mapping[int, int]
    from_gathered: Set[int]


def follow(schedule: Schedule, frame: Frame) -> None:
    """Check a schedule in its frame, all of it.

    Raises:
        InvalidSchedule: names the first fault.
    """
    check_form(schedule, frame)
    walk = Walk(schedule, frame)
    entries: dict[int, list[Action]] = {slot: [] for slot, _ in frame.anchors}
    for action in schedule.actions:
        entries.setdefault(action.slot, []).append(action)
    for slot in sorted(entries):
        for action in entries[slot]:
            walk.do(action)
        walk.leave_entry(slot)
    walk.end()


def check_form(schedule: Schedule, frame: Frame) -> None:
    """Check everything that does not depend on the order of actions.

    Raises:
        InvalidSchedule: names the first fault.
    """
    _check_lists(schedule, frame)
    _check_slots(schedule, frame)
    _check_tier(schedule, frame)


def _check_lists(schedule: Schedule, frame: Frame) -> None:
    """Every value that moves has a decision, and no value that is held for replays leaves."""
    for choice, moved in (("swap", schedule.swapped), ("recompute", schedule.recomputed)):
        if len(set(moved)) != len(moved):
            _refuse(f"a value is listed twice for {choice}")
        for value in moved:
            decided = frame.decisions.get(value, "nothing")
            if decided != choice:
                _refuse(f"{choice} of value {value}, for which {decided!r} was decided")
    made = {value for values in frame.writes for value in values}
    gone = {*schedule.recomputed, *(action.target for action in schedule.actions if action.kind == "free")}
    if len(set(schedule.sources)) != len(schedule.sources):
        _refuse("a source is listed twice")
    for source in schedule.sources:
        if source < 0 or source not in made or source in gone:
            _refuse(f"value {source} cannot be held as a source")


def _check_slots(schedule: Schedule, frame: Frame) -> None:
    """Actions are in order, at slots where the runtime can act."""
    region = range(frame.first_slot, frame.first_slot + len(frame.writes))
    anchors = {slot for slot, _ in frame.anchors}
    last = 0
    for action in schedule.actions:
        if action.target < 0:
            _refuse("an action names a negative target")
        if action.slot < last:
            _refuse("its actions are not in ascending order of slots")
        in_forward = action.slot in region and action.kind in _FORWARD_KINDS
        in_backward = action.slot in anchors and action.kind in _BACKWARD_KINDS
        if not (in_forward or in_backward):
            _refuse(f"{action.kind} of {action.target} is at slot {action.slot}, where no schedule can act")
        last = action.slot


def _check_tier(schedule: Schedule, frame: Frame) -> None:
    """Every swapped value has room of its own in the tier, from its copy out until its last copy back."""
    offsets = dict(schedule.host_offsets)
    if len(offsets) != len(schedule.host_offsets) or offsets.keys() != set(schedule.swapped):
        _refuse("the tier's layout is not that of the swapped values")
    sizes = {value: round_up(frame.size_bytes[value], TIER_ALIGNMENT_BYTES) for value in offsets}
    for value, offset in offsets.items():
        if offset < 0 or offset + sizes[value] > schedule.host_bytes:
            _refuse(f"value {value} lies outside the tier")
        if offset % TIER_ALIGNMENT_BYTES:
            _refuse(f"value {value} lies at {offset} in the tier, which is no multiple of {TIER_ALIGNMENT_BYTES}")
    if schedule.host_bytes > sum(sizes.values()):
        _refuse(f"the tier has {schedule.host_bytes} bytes, more than the swapped values take")
    _check_rooms(schedule.actions, offsets, sizes)


def _check_rooms(actions: Sequence[Action], offsets: Mapping[int, int], sizes: Mapping[int, int]) -> None:
    """No two values share room at the same time. A room is free after the slot of its value's last wait."""
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
                _refuse(f"values {min(value, other)} and {max(value, other)} overlap in the tier")
        taken.insert(place, room)


class Walk:
    """Follows actions in order, and tracks where each value is and what the schedule holds for replays.

    Each method raises `InvalidSchedule` at the first fault. The schedule has passed `check_form`.

    Attributes:
        state: of each value that moves: "here", "copied", "emptied", "filling" (the program holds all of these),
            "away", "arriving" or "back".
        refilled: swapped values that came back in the forward pass.
        intermediates: replayed values that live until their drop at the same entry.
    """

    def __init__(self, schedule: Schedule, frame: Frame) -> None:
        self._frame = frame
        self._made_at = {v: frame.first_slot + i for i, ids in enumerate(frame.writes) for v in ids if v >= 0}
        self._unpacks = dict(frame.anchors)
        self._unpacked_at = {value: slot for slot, values in frame.anchors for value in values}
        self._swapped, self._recomputed = frozenset(schedule.swapped), frozenset(schedule.recomputed)
        self._held = set(schedule.sources)
        self._dropped = frozenset(action.target for action in schedule.actions if action.kind == "drop")
        self.state = dict.fromkeys((*schedule.swapped, *schedule.recomputed), "here")
        self.refilled: set[int] = set()
        self.intermediates: set[int] = set()

    def do(self, action: Action) -> None:
        """Follow one action."""
        if action.kind == "replay":
            self._replay(action)
        elif action.kind == "drop":
            self._drop(action)
        elif action.target in self._swapped:
            self._move(action)
        elif action.kind == "empty" and action.target in self._recomputed:
            self._empty(action)
        else:
            _refuse(f"slot {action.slot}: {action.kind} of value {action.target}, which is not swapped")

    def _empty(self, action: Action) -> None:
        if self.state[action.target] != "here" or self._made_at[action.target] >= action.slot:
            _refuse(f"slot {action.slot}: empty of value {action.target}, which is not present")
        if action.target in self._frame.from_gathered:
            _refuse(f"slot {action.slot}: empty of value {action.target}, which cannot be made again at any time")
        self.state[action.target] = "emptied"

    def _move(self, action: Action) -> None:
        value = action.target
        before = self.state[value] if self._made_at[value] < action.slot else "not made"
        after = _MOVES[action.kind].get(before)
        if after is None:
            _refuse(f"slot {action.slot}: {action.kind} of value {value}, which is {before} by then")
        if action.kind == "free" and 0 <= self._unpacked_at.get(value, -1) < action.slot:
            _refuse(f"slot {action.slot}: free of value {value} after its first unpack")
        if action.kind == "refill":
            self.refilled.add(value)
        self._arrive(value, after)

    def _arrive(self, value: int, state: str) -> None:
        self.state[value] = state
        if value in self._dropped and state in ("arriving", "back"):
            self._held.add(value)

    def _replay(self, action: Action) -> None:
        where = f"slot {action.slot}: replay of op {action.target}"
        position = action.target - self._frame.first_slot
        if not 0 <= position < len(self._frame.writes):
            _refuse(f"{where}, which is no op of the region")
        outputs = set(action.outputs)
        if len(outputs) != len(action.outputs) or not outputs <= set(self._frame.writes[position]) - {-1}:
            _refuse(f"{where} keeps what it does not write")
        for value in action.in_place:
            if value not in self.intermediates or self._made_at[value] >= action.target:
                _refuse(f"{where} must not overwrite value {value}")
            self.intermediates.discard(value)
        for value in action.outputs:
            self._keep(where, value)

    def _keep(self, where: str, value: int) -> None:
        if value in self._recomputed:
            if self.state[value] == "back":
                _refuse(f"{where} makes value {value} for the second time")
            self._arrive(value, "back")
        elif value in self._swapped or value in self._held or value in self.intermediates:
            _refuse(f"{where} makes value {value}, which is present")
        else:
            self.intermediates.add(value)

    def _drop(self, action: Action) -> None:
        if action.target in self.intermediates:
            self.intermediates.remove(action.target)
        elif action.target in self._held:
            self._held.remove(action.target)
        else:
            _refuse(f"slot {action.slot}: drop of value {action.target}, which the schedule does not hold")

    def leave_entry(self, slot: int) -> None:
        """Check what the actions of an entry leave behind, and what is first unpacked in its slot."""
        if self.intermediates:
            _refuse(f"slot {slot}: replayed intermediate {min(self.intermediates)} is not dropped")
        for value in self._unpacks.get(slot, ()):
            state = self.state.get(value, "here")
            missing = value in self._recomputed and state != "back"
            if missing or state in ("emptied", "filling", "away", "arriving"):
                _refuse(f"slot {slot}: value {value} is unpacked but not present")

    def end(self) -> None:
        """Check what is left at the end of the step."""
        if self._held:
            _refuse(f"value {min(self._held)} is held for replays and never dropped")
        for value in sorted(self._swapped):
            state = self.state[value]
            if state in ("here", "emptied", "filling") or (state == "copied" and value not in self.refilled):
                _refuse(f"value {value} is swapped and never freed")


def _refuse(fault: str) -> NoReturn:
    raise InvalidSchedule(fault)
