"""A plan indexed for the lookups of the runtime, built once when the plan is applied."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..ir import Action, ExpectedOp, Plan
from ..ir.plan import GRAPH
from ..torchtools import watch
from ..torchtools.effects import StorageMap
from ..torchtools.tensors import fingerprint
from .cursor import Cursor, NativeUse
from .engines.protocol import Arena
from .leaving import CopyTable

OnMismatch = Literal["warn", "error", "follow"]
_SIZES = re.compile(r"\[([^\]]*)\]")  # of a tensor, in a fingerprint
# In the order in which the native watch knows them. The others are run in Python.
_NATIVE_ACTIONS = ("copy_out", "free", "copy_in", "wait", "replay", "drop")


class OpRecogniser:
    """Compares ops with those that a plan expects, by fingerprint.

    A fingerprint is text, and formatting it costs more than many ops. So what matched at a position (operator, shapes,
    dtypes) is remembered, and compared first from the second step on.

    Args:
        expected: Forward ops of the region, in order.
        has_any_sizes: Whether results may have other sizes than expected, in as many dimensions.
    """

    def __init__(self, expected: tuple[ExpectedOp, ...], *, has_any_sizes: bool = False) -> None:
        self._expected, self._has_any_sizes = expected, has_any_sizes
        self._matched: list[tuple[Any, list[tuple[torch.Size, torch.dtype]]] | None] = [None] * len(expected)

    def is_expected(
        self,
        position: int,
        func: Any,
        name: str,
        outputs: list[torch.Tensor],
        is_same: Callable[[str, str], bool] = operator.eq,
    ) -> bool:
        """Whether the op at a position of the region is the planned one.

        Args:
            position: Number of the op in the region, less than the number of expected ops.
            func: The operator.
            name: The operator's name, as in fingerprints.
            outputs: The tensors among its results.
            is_same: Whether two fingerprints stand for the same op.
        """
        matched = self._matched[position]
        if matched is not None and matched[0] is func and len(outputs) == len(matched[1]):
            for tensor, (shape, dtype) in zip(outputs, matched[1], strict=True):
                has_sizes = tensor.dim() == len(shape) if self._has_any_sizes else tensor.shape == shape
                if not has_sizes or tensor.dtype is not dtype:
                    return False  # the fingerprint would differ in the same place
            return True
        expected, actual = self._expected[position].fingerprint, fingerprint(name, outputs)
        if self._has_any_sizes:
            expected, actual = _SIZES.sub(_as_many, expected), _SIZES.sub(_as_many, actual)
        if not is_same(expected, actual):
            return False
        self._matched[position] = (func, [(tensor.shape, tensor.dtype) for tensor in outputs])
        return True


@dataclass(frozen=True, slots=True)
class ActionTable:
    """The lookups of one plan.

    Attributes:
        expected: Forward ops of the region, in order.
        first_slot: Slot of the first forward op.
        actions: Maps each slot to the actions at its entry, in order.
        anchor_of: Maps values to the slot in which the backward pass first reads them, for slots that have actions.
        swapped: Values that are swapped.
        recomputed: Values that are recomputed.
        sources: Values that are held for replays.
        emptied: Values whose bytes leave the device while the program still holds them.
        dropped: Values that the schedule releases by a "drop" action.
        replay_slots: Slots that begin with a replay.
        replayed: Slots of ops whose calls are recorded.
        read_again: Values that these ops read. None: not known.
        offsets: Maps each swapped value to its offset in the tier, in bytes.
        room_bytes: Maps each value to the size that it was planned with.
        gathered: Parameters in storages that FSDP fills and empties, which replays read while they are there.
        from_gathered: Recomputed values that can only be made again while such parameters are there.
        recogniser: Compares ops with the expected ones.
        copies: Room for copies of recomputed values.
        native_path: The same for the native watch, which follows it, or None without one.
        native_use: Whether it can.
        has_any_sizes: Whether results of ops may have other sizes than they had in the step that was planned.
        acts_natively: Whether the native path knows of values that it moves, or makes again, by itself.
        has_graphs: Whether compiled graphs are among the ops. A dispatch mode watches then.
    """

    expected: tuple[ExpectedOp, ...]
    first_slot: int
    actions: dict[int, tuple[Action, ...]]
    anchor_of: dict[int, int]
    swapped: frozenset[int]
    recomputed: frozenset[int]
    sources: frozenset[int]
    emptied: frozenset[int]
    dropped: frozenset[int]
    replay_slots: frozenset[int]
    replayed: frozenset[int]
    read_again: frozenset[int] | None
    offsets: dict[int, int]
    room_bytes: dict[int, int]
    gathered: frozenset[int]
    from_gathered: frozenset[int]
    recogniser: OpRecogniser
    copies: CopyTable
    native_path: Any
    native_use: NativeUse
    acts_natively: bool
    has_graphs: bool
    has_any_sizes: bool = False

    def has_at_hand(self, position: int, reads: tuple[int, ...]) -> bool:
        """Whether the plan has at hand what an op reads where it runs it again.

        An op may read other values than it did when the step was profiled, as where two branches change places.

        Args:
            position: Of the op on the path.
            reads: The values of the step that it reads.
        """
        planned = self.expected[position].reads
        return planned is None or set(reads).issubset(planned)

    def is_read_again(self, number: int) -> bool:
        """Whether a replay may read a value."""
        return self.read_again is None or number in self.read_again

    @property
    def can_be_native(self) -> bool:
        """Whether the native watch can follow the path."""
        return self.native_path is not None and not self.native_use.is_refused

    @property
    def does_nothing(self) -> bool:
        """Whether everything is kept, so that the step runs without hooks."""
        return not self.actions

    @classmethod
    def of(cls, plan: Plan) -> ActionTable:
        """Index a plan."""
        schedule = plan.schedule
        actions: dict[int, list[Action]] = {}
        for action in schedule.actions:
            actions.setdefault(action.slot, []).append(action)
        swapped, recomputed = frozenset(schedule.swapped), frozenset(schedule.recomputed)
        sources, from_gathered = frozenset(schedule.sources), frozenset(plan.from_gathered)
        emptied = frozenset(a.target for a in schedule.actions if a.kind == "empty")
        replayed = frozenset(a.target for a in schedule.actions if a.kind == "replay")
        anchor_of = {value: slot for slot, values in plan.anchors if slot in actions for value in values}
        awaited = emptied | from_gathered
        slots = range(plan.first_slot, plan.first_slot + len(plan.expected))
        has_graphs = any(op.name == GRAPH for op in plan.expected)
        native_path = (
            None
            if not actions or has_graphs
            else watch.path(
                writes=[op.writes for op in plan.expected],
                reads=[op.reads for op in plan.expected],
                due=[slot in actions or (slot in replayed and bool(plan.gathered)) for slot in slots],
                replayed=[slot in replayed and not plan.gathered for slot in slots],
                awaited=[not awaited.isdisjoint(op.writes) for op in plan.expected],
                moved=sorted(swapped | recomputed),
                swapped=sorted(swapped),
                sources=sorted(sources),
                anchored=sorted(anchor_of),
            )
        )
        acts_natively = native_path is not None and not plan.gathered
        if acts_natively:
            acts_natively = _plan_native_actions(native_path, plan, actions, anchor_of)
        return cls(
            expected=plan.expected,
            first_slot=plan.first_slot,
            actions={slot: tuple(listed) for slot, listed in actions.items()},
            anchor_of=anchor_of,
            swapped=swapped,
            recomputed=recomputed,
            sources=sources,
            emptied=emptied,
            dropped=frozenset(a.target for a in schedule.actions if a.kind == "drop"),
            replay_slots=frozenset(a.slot for a in schedule.actions if a.kind == "replay"),
            replayed=replayed,
            read_again=_read_by(plan, replayed),
            offsets=dict(schedule.host_offsets),
            room_bytes={decision.value: decision.size_bytes for decision in plan.choices},
            gathered=frozenset(plan.gathered),
            from_gathered=from_gathered,
            recogniser=OpRecogniser(plan.expected),
            copies=CopyTable.of(plan),
            native_path=native_path,
            native_use=NativeUse(plan.expected),
            acts_natively=acts_natively,
            has_graphs=has_graphs,
        )

    def after(self, earlier: ActionTable) -> ActionTable:
        """Return it with what is known of its ops from steps on an earlier plan, if that expects the same ones.

        Args:
            earlier: The earlier plan.
        """
        if (self.first_slot, self.expected) != (earlier.first_slot, earlier.expected):
            return self
        if self.native_path is not None and earlier.native_path is not None:
            self.native_path.learn_from(earlier.native_path)
        return replace(self, recogniser=earlier.recogniser, native_use=earlier.native_use)

    def with_any_sizes(self) -> ActionTable:
        """Return it for steps whose ops are the same, and give results of other sizes in each of them.

        What is larger than its room finds another one, and what a step takes more than planned has to be made up for
        beneath the plan.
        """
        if self.native_path is not None:
            self.native_path.take_any_sizes()
        recogniser = OpRecogniser(self.expected, has_any_sizes=True)
        return replace(self, recogniser=recogniser, native_use=NativeUse(self.expected), has_any_sizes=True)


def _as_many(sizes: re.Match[str]) -> str:
    """Return how many sizes there are in place of these."""
    return f"[{len(sizes[1].split(',')) if sizes[1] else 0} sizes]"


def _read_by(plan: Plan, slots: frozenset[int]) -> frozenset[int] | None:
    """The values that the ops of some slots read, or None if the plan does not say so."""
    reads = [plan.expected[slot - plan.first_slot].reads for slot in slots]
    return None if None in reads else frozenset(value for values in reads for value in values or ())


def _plan_native_actions(
    native_path: Any, plan: Plan, actions: dict[int, list[Action]], anchor_of: dict[int, int]
) -> bool:
    """Tell the native path what happens at each slot, and to which values nothing happens but that they are copied and
    come back, or are made again.

    Returns whether there are such values.
    """
    schedule = plan.schedule
    emptied = {action.target for action in schedule.actions if action.kind in ("empty", "refill")}
    copied = set(schedule.swapped) - set(schedule.recomputed) - emptied
    made_again = set(schedule.recomputed) - set(schedule.swapped) - emptied
    room_bytes = {decision.value: decision.size_bytes for decision in plan.choices}
    offsets = dict(schedule.host_offsets)
    moves = [
        (slot, _native_number(action), action.target, action.outputs, action.in_place)
        for slot, listed in actions.items()
        for action in listed
    ]
    rooms = [(value, offsets[value], room_bytes[value]) for value in sorted(copied)]
    native_path.plan(plan.first_slot, rooms, sorted(made_again), moves, list(anchor_of.items()))
    return bool(copied or made_again)


def _native_number(action: Action) -> int:
    return _NATIVE_ACTIONS.index(action.kind) if action.kind in _NATIVE_ACTIONS else len(_NATIVE_ACTIONS)


@dataclass(frozen=True, slots=True)
class Advice:
    """A plan for one step.

    Attributes:
        table: The plan, indexed for lookups.
        arena: Room in the swap tier for what it swaps. The step closes it.
        on_mismatch: What to do if the step leaves the path: "warn", "error", or "follow", which says nothing.
    """

    table: ActionTable
    arena: Arena
    on_mismatch: OnMismatch


def cursor_of(table: ActionTable | None, values: StorageMap) -> Any:
    """Return a cursor for a step: a native region, unless there is none, or the plan does nothing.

    Args:
        table: The plan of the step, or None without one.
        values: Which value each storage holds.
    """
    if table is not None and table.native_path is None:
        return Cursor()
    return watch.region(None if table is None else table.native_path, values) or Cursor()
