"""The blocks that a step under a schedule allocates, with their lifetimes: what a packer places in one arena.

Time is counted in *ticks*. Each slot has one tick for its entry once the leading copies out and frees are done, one for
each further action that changes memory, and one for its body. So blocks that the simulator counts at the same point may
lie at the same place if they never live together, and the highest sum over the ticks of a point is what the simulator
says of it, to the byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import LEADING
from ..analysis.remainder import Storage, remainders, storages
from ..ir import Action, Schedule
from ..ir.layout import Block, BlockKind

_ALIGNMENT_BYTES = {"requested": 64, "rounded": 512, "allocated": 512}


@dataclass(frozen=True, slots=True)
class StepBlock:
    """A block of a step.

    Attributes:
        kind, target: as of a `PlacedBlock`.
        block: its size and its lifetime in ticks.
    """

    kind: BlockKind
    target: int
    block: Block


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """All blocks of a step.

    Attributes:
        items: in order of their beginnings.
        outside_bytes: what exists before, in and after the step; it is in no arena of the step.
        point_ticks: (first, end) ticks of each point.
    """

    items: tuple[StepBlock, ...]
    outside_bytes: int
    point_ticks: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> list[Block]:
        """What is packed."""
        return [item.block for item in self.items]


class BlockMaker:
    """Makes the blocks of schedules of one dataflow, using what does not depend on the schedule again.

    Attributes:
        outside_bytes: what exists before, in and after the step.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow = dataflow
        self._storages = storages(dataflow)
        self._by_value = {storage.value: storage for storage in self._storages}
        self._remainders, self.outside_bytes = remainders(dataflow, self._storages)
        self._alignment_bytes = _ALIGNMENT_BYTES[dataflow.profile.sizes]

    def blocks(self, schedule: Schedule) -> StepBlocks:
        """Return the blocks of a schedule that the verifier accepts."""
        ticks = _Ticks(self._dataflow.end, schedule.actions)
        presence = _Presence(self._dataflow, schedule, ticks, self._by_value)
        items = [self._item(kind, target, *span) for kind, target, span in presence.spans()]
        for rest in self._remainders:
            begin, end = ticks.of_point(rest.first_point), ticks.of_point(rest.end_point)
            items.append(self._item(rest.kind, rest.slot, begin, end, rest.size_bytes))
        items.sort(key=lambda item: (item.block.lower, item.block.upper, item.kind, item.target))
        return StepBlocks(tuple(items), self.outside_bytes, ticks.points())

    def _item(self, kind: BlockKind, target: int, lower: int, upper: int, size_bytes: int) -> StepBlock:
        return StepBlock(kind, target, Block(lower, upper, size_bytes, self._alignment_bytes, f"{kind} {target}"))


class _Ticks:
    """The tick of each action and of each point."""

    def __init__(self, end: int, actions: tuple[Action, ...]) -> None:
        self._bodies: list[int] = []
        self.of_action: list[int] = []
        place = tick = 0
        self._entries: list[int] = []
        for slot in range(end):
            self._entries.append(tick)
            leading = True
            while place < len(actions) and actions[place].slot == slot:
                leading = leading and actions[place].kind in LEADING
                moves = not leading and actions[place].kind not in ("wait", "copy_out")
                tick += moves
                self.of_action.append(tick)
                place += 1
            tick += 1
            self._bodies.append(tick)
            tick += 1
        self.end = tick

    def of_point(self, point: int) -> int:
        """Return the first tick of a point; past the last one, the end."""
        if point >= 2 * len(self._entries):
            return self.end
        return self._bodies[point // 2] if point % 2 else self._entries[point // 2]

    def points(self) -> tuple[tuple[int, int], ...]:
        """Return the first tick of each point and the first one after it."""
        bounds = [self.of_point(point) for point in range(2 * len(self._entries) + 1)]
        return tuple(pairwise(bounds))


class _Presence:
    """When each storage is there, and what replays make beside."""

    def __init__(self, dataflow: Dataflow, schedule: Schedule, ticks: _Ticks, by_value: dict[int, Storage]) -> None:
        self._dataflow = dataflow
        self._values = dataflow.profile.values
        self._ticks = ticks
        self._storages = by_value
        self._swapped, self._recomputed = frozenset(schedule.swapped), frozenset(schedule.recomputed)
        self._transient: dict[int, int] = {}  # replayed intermediate -> tick at which its storage was made
        self._gone: defaultdict[int, list[int]] = defaultdict(list)
        self._arrived: defaultdict[int, list[int]] = defaultdict(list)
        self._dropped: dict[int, int] = {}
        self._beside: list[tuple[BlockKind, int, tuple[int, int, int]]] = []
        for action, tick in zip(schedule.actions, ticks.of_action, strict=True):
            self._note(action, tick)

    def spans(self) -> Iterator[tuple[BlockKind, int, tuple[int, int, int]]]:
        """Give (kind, target, (first tick, end tick, bytes)) of all blocks."""
        for value, storage in self._storages.items():
            for begin, end in self._lives(storage):
                if begin < end:
                    yield self._kind(value), value, (begin, end, storage.size_bytes)
        yield from self._beside

    def _kind(self, value: int) -> BlockKind:
        if value in self._swapped:
            return "swap"
        if value in self._recomputed:
            return "recompute"
        return "keep" if value in self._dataflow.activation_ids else "fixed"

    def _note(self, action: Action, tick: int) -> None:
        value = action.target
        if action.kind in ("free", "empty"):
            self._gone[value].append(tick)
        elif action.kind in ("copy_in", "refill"):
            self._arrived[value].append(tick)
        elif action.kind == "replay":
            self._replay(action, tick)
        elif action.kind == "drop":
            if value in self._transient:
                self._end_transient(value, tick)
            else:
                self._dropped[value] = tick

    def _replay(self, action: Action, tick: int) -> None:
        op = self._dataflow.profile.ops[action.target]
        taken_over = {}
        for value in action.in_place:
            successors = [i for i in op.writes if self._values[i].overwrites == value]
            if successors and self._values[successors[0]].allocated_bytes == self._values[value].allocated_bytes:
                taken_over[successors[0]] = self._transient.pop(value)
            else:
                self._end_transient(value, tick)
        for value in op.writes:
            begin = taken_over.get(value, tick)
            if value not in action.outputs:  # it is gone after the op
                self._beside.append(("replay", value, (begin, tick + 1, self._values[value].allocated_bytes)))
            elif value in self._recomputed:
                self._arrived[value].append(begin)
            else:
                self._transient[value] = begin
        workspace_bytes = self._dataflow.replay_extra_bytes(op.index)
        if workspace_bytes:
            self._beside.append(("temporary", op.index, (tick, tick + 1, workspace_bytes)))

    def _end_transient(self, value: int, tick: int) -> None:
        begin = self._transient.pop(value)
        self._beside.append(("replay", value, (begin, tick, self._values[value].allocated_bytes)))

    def _lives(self, storage: Storage) -> Iterator[tuple[int, int]]:
        """Give the ticks between which a storage is there: until it leaves, and from each return on."""
        value = storage.value
        ends_in_core = self._ticks.of_point(storage.end_point)
        last = max(ends_in_core, self._dropped.get(value, 0))
        gone = list(self._gone[value])
        if value in self._recomputed:
            release = self._dataflow.span_end(self._values[value].release) + 1
            gone.append(self._ticks.of_point(release))
        begins = [self._ticks.of_point(storage.first_point), *self._arrived[value]]
        for place, begin in enumerate(begins):
            following = begins[place + 1] if place + 1 < len(begins) else last
            left = [tick for tick in gone if begin <= tick]
            yield begin, min(min(left, default=last), max(following, begin), last)
