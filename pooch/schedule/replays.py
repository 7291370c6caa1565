"""Decides which forward ops are replayed at which anchor, which outputs are kept, and what is held for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..analysis.dataflow import Dataflow
from ..ir import Action, Choice

# A search lowers hundreds of schedules that differ in a few actions: equal actions are one object.
action = lru_cache(maxsize=1 << 16)(Action)


@dataclass(slots=True)
class Replays:
    """All replays of a step.

    Attributes:
        recomputed: values that autograd does not keep, ascending.
        needs: first slot at which a swapped value is needed, by its unpack or by a replay.
        actions: by anchor slot, in order: replays, drops, and waits for swapped values just before their reader.
        waited: swapped values with a wait in `actions`.
        reads: values "made" by the step (not replayed intermediates) that replays read.
    """

    recomputed: tuple[int, ...] = ()
    needs: dict[int, int] = field(default_factory=dict)
    actions: dict[int, list[Action]] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)


class ReplayTables:
    """The parts of a dataflow that replays need, as plain lists, since lowering is called hundreds of times."""

    def __init__(self, dataflow: Dataflow) -> None:
        profile = dataflow.profile
        values = profile.values
        forward = profile.ops[: profile.forward_ops]
        self.anchors = dataflow.anchors
        self.is_source = [dataflow.is_source(value) for value in values]
        at_hand = [  # gathered parameters are, wherever a replay that reads them is not refused
            dataflow.is_always_at_hand(value) or dataflow.gathering.is_gathered(value.id) for value in values
        ]
        self.reads = [tuple(dict.fromkeys(i for i in op.reads if not at_hand[i])) for op in forward]
        self.writes = [op.writes for op in forward]
        self.saved_writes = [tuple(i for i in op.writes if i in dataflow.activation_ids) for op in forward]
        self.in_place = [
            tuple(values[i].overwrites for i in op.writes if values[i].overwrites in op.reads) for op in forward
        ]
        self.release = [value.release for value in values]
        self.first_unpack = [value.first_unpack for value in values]
        self.recipes = {v.id: dataflow.recipe(v.id) for v in dataflow.activations if dataflow.refusal(v.id) is None}


def plan_replays(tables: ReplayTables, decisions: Mapping[int, Choice]) -> Replays:
    """Walk the anchors in order, and replay each recomputed value once."""
    closures = _Closures(tables, decisions)
    for slot, unpacked in tables.anchors:
        closures.visit(slot, unpacked)
    return _Emission(tables, closures).emit()


class _Closures:
    """First pass: finds the ops that each anchor replays, and when each value comes back."""

    def __init__(self, tables: ReplayTables, decisions: Mapping[int, Choice]) -> None:
        self._tables = tables
        self.swapped = {value for value, choice in decisions.items() if choice == "swap"}
        self.recomputed = {value for value, choice in decisions.items() if choice == "recompute"}
        self.needs: dict[int, int] = {}
        self.made: dict[int, int] = {}  # recomputed value -> slot of its replay
        self.ops: dict[int, list[int]] = {}  # slot -> ops, ascending

    def visit(self, slot: int, unpacked: tuple[int, ...]) -> None:
        pending = []
        for value in unpacked:
            if value in self.recomputed:
                pending.append(value)
            elif value in self.swapped:
                self.needs.setdefault(value, slot)
        if pending:
            ops = self._close(slot, pending)
            if ops:
                self._take_siblings(slot, ops)
                self.ops[slot] = sorted(ops)

    def _close(self, slot: int, pending: list[int]) -> set[int]:
        ops: set[int] = set()
        while pending:
            value = pending.pop()
            if value in self.made:
                continue
            if self._tables.release[value] >= slot:  # the program still holds it, so a replay would free nothing
                self.recomputed.discard(value)
                continue
            self.made[value] = slot
            recipe = self._tables.recipes[value]
            ops.update(recipe.ops)
            for source in recipe.sources:
                if source in self.recomputed:
                    pending.append(source)
                elif source in self.swapped:
                    self.needs.setdefault(source, slot)
        return ops

    def _take_siblings(self, slot: int, ops: set[int]) -> None:
        """Keep other outputs of the ops that are needed later, so that no op runs twice for them."""
        for op in ops:
            for value in self._tables.saved_writes[op]:
                wanted = value in self.recomputed and value not in self.made and self._tables.first_unpack[value] > slot
                if wanted and self._tables.release[value] < slot:
                    self.made[value] = slot


class _Emission:
    """Second pass: emits the actions, given the last read of each value."""

    def __init__(self, tables: ReplayTables, closures: _Closures) -> None:
        self._tables = tables
        self._closures = closures
        self._last_slot = self._last_readers()
        self._replays = Replays(tuple(sorted(closures.recomputed)), closures.needs)

    def _last_readers(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for slot, ops in self._closures.ops.items():  # ascending
            for op in ops:
                for value in self._tables.reads[op]:
                    last[value] = slot
        return last

    def emit(self) -> Replays:
        for slot, ops in self._closures.ops.items():
            self._replays.actions[slot] = self._emit_closure(slot, ops)
        return self._replays

    def _emit_closure(self, slot: int, ops: list[int]) -> list[Action]:
        reads = self._tables.reads
        last_op = {value: op for op in ops for value in reads[op]}
        actions: list[Action] = []
        for op in ops:
            self._emit_waits(slot, op, actions)
            reused = self._reusable(op, last_op)
            actions.append(action(slot, "replay", op, self._outputs(slot, op, last_op), reused))
            self._emit_drops(slot, op, last_op, reused, actions)
        return actions

    def _emit_waits(self, slot: int, op: int, actions: list[Action]) -> None:
        waited = self._replays.waited
        for value in self._tables.reads[op]:
            is_due = value in self._closures.swapped and self._closures.needs.get(value) == slot
            if is_due and value not in waited:
                waited.add(value)
                actions.append(action(slot, "wait", value))

    def _outputs(self, slot: int, op: int, last_op: dict[int, int]) -> tuple[int, ...]:
        made, is_source = self._closures.made, self._tables.is_source
        return tuple(
            value
            for value in self._tables.writes[op]
            if made.get(value) == slot or (value in last_op and not is_source[value])
        )

    def _reusable(self, op: int, last_op: dict[int, int]) -> tuple[int, ...]:
        """Return the replayed intermediates whose storage an in-place op may reuse, as nothing reads them later."""
        targets = self._tables.in_place[op]
        return tuple(value for value in targets if not self._tables.is_source[value] and last_op.get(value) == op)

    def _emit_drops(
        self, slot: int, op: int, last_op: dict[int, int], reused: tuple[int, ...], actions: list[Action]
    ) -> None:
        for value in self._tables.reads[op]:
            is_source = self._tables.is_source[value]
            if is_source:
                self._replays.reads.add(value)
            if last_op[value] != op or value in reused:
                continue
            if not is_source or self._last_slot[value] == slot:
                actions.append(action(slot, "drop", value))
