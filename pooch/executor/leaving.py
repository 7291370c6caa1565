"""Values of a planned step that leave in order to be made again, and what their replays are compared with.

What is compared are the bytes that plain training would read: those that the value has when the program releases it,
which may be later than autograd has saved it. So a value that is looked at wholly stays until nothing else holds it,
and leaves before the next op takes memory: the step's peak is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ground.errors import TierError
from ..ground.units import round_up
from ..ir import Plan
from ..machine import Call, Level, Value
from ..machine.values import Ticket
from ..torchtools.operators import has_undefined_bytes, is_foreign_name, operator_facts
from .cursor import Cursor
from .engines.health import TierHealth
from .engines.protocol import Arena, CopyEngine
from .memory import is_held_elsewhere
from .statistics import RunStats
from .verification import Difference, Verification, likely_cause, new_witness

_ALIGNMENT_BYTES = 4096  # offsets in a tier are multiples of this
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Where in the tier there is room for a copy of each recomputed value, and what to call it.

    Attributes:
        offsets: Maps values to offsets in bytes.
        sizes_bytes: Maps values to the sizes that they were planned with.
        size_bytes: Room for all of them.
        modules: Maps values to the path of the module that makes them, and what it calls them.
        undefined: Values with bytes that nobody has written, so that they cannot be compared.
        foreign: Values made by operators that are not PyTorch's own.
        number: Of the plan, among all that were indexed.
    """

    offsets: dict[int, int]
    sizes_bytes: dict[int, int]
    size_bytes: int
    modules: dict[int, str]
    undefined: frozenset[int]
    foreign: frozenset[int]
    number: int

    def key(self, value: int) -> Hashable:
        """What the recipe of a value is known by, among those of other plans."""
        return self.number, value

    @classmethod
    def of(cls, plan: Plan) -> CopyTable:
        """Return the table of a plan."""
        offsets: dict[int, int] = {}
        end_bytes = 0
        leaving = [choice for choice in plan.choices if choice.choice == "recompute"]
        for choice in leaving:
            offsets[choice.value] = end_bytes
            end_bytes += round_up(max(choice.size_bytes, 1), _ALIGNMENT_BYTES)
        sizes_bytes = {choice.value: choice.size_bytes for choice in leaving}
        modules = {choice.value: choice.label for choice in plan.choices}
        undefined = frozenset(
            value
            for op in plan.expected
            for position, value in enumerate(op.writes)
            if has_undefined_bytes(op.name, position)
        )
        foreign = frozenset(value for op in plan.expected if is_foreign_name(op.name) for value in op.writes)
        return cls(offsets, sizes_bytes, end_bytes, modules, undefined, foreign, next(_numbers))


class StepCopies:
    """Room for copies of one step, taken when the first one is made.

    Args:
        engine: Copies.
        table: Where each value has room.
    """

    def __init__(self, engine: CopyEngine, table: CopyTable) -> None:
        self._engine, self._table = engine, table
        self._arena: Arena | None = None
        self._has_no_room = False

    @property
    def is_open(self) -> bool:
        """Whether there is a copy."""
        return self._arena is not None

    def place(self, value: int, size_bytes: int) -> FixedPlace | None:
        """Return room for a value, or None if the tier has no more."""
        offset_bytes = self._table.offsets.get(value)
        if offset_bytes is None or self._has_no_room or size_bytes > self._table.sizes_bytes[value]:
            return None
        if self._arena is None:
            try:
                self._arena = self._engine.open_arena(self._table.size_bytes, "copies")
            except TierError as error:
                self._has_no_room = True
                self._engine.health.failed(error)
                return None
        return FixedPlace(self._arena, offset_bytes, self._engine.health)

    def close(self) -> None:
        """Release the room."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


@dataclass(slots=True)  # not frozen, which takes longer to make: there is one for each copy of a step
class FixedPlace:
    """Room for one value at an offset that was chosen ahead."""

    arena: Arena
    offset_bytes: int
    health: TierHealth

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended.

        Args:
            error: Why it failed, or None.
        """
        if error is not None:
            self.health.failed(error)

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        """Start copying a storage here."""
        return self.arena.copy_out(storage, self.offset_bytes)

    def copy_in(self, storage: torch.UntypedStorage) -> Ticket:
        """Start filling a storage from here."""
        return self.arena.copy_in(storage, self.offset_bytes)

    def release(self) -> None:
        """Do nothing: the room is that of the step."""


class Leaving:
    """The witnesses of one step. Its methods are called with the step's lock held.

    Args:
        verification: What is known of the recipes.
        copies: Room for copies.
        table: What to call values.
        stats: Counters of the step, updated in place.
        call_of: Returns the call that makes a value, or None if it cannot run again.
        cursor: Is told that something waits for the program to release it.
    """

    def __init__(
        self,
        verification: Verification,
        copies: StepCopies,
        table: CopyTable,
        stats: RunStats,
        call_of: Callable[[int], Call | None],
        cursor: Cursor,
    ) -> None:
        self.verification, self._copies, self._table, self._stats = verification, copies, table, stats
        self._call_of, self._cursor = call_of, cursor
        self.pending: dict[int, Value] = {}
        self.tainted: set[int] = set()  # what the program may have changed through an address, and what is made of it

    def saved(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Begin to watch a recomputed value that autograd has saved.

        It is not replayed in this step if the program has its address, or if the op that made it was not recorded.
        """
        key = self._table.key(value.number)
        level = self.verification.level(
            key, is_foreign=value.number in self._table.foreign, device_type=storage.device.type
        )
        call = self._call_of(value.number)  # first: what the native watch has recorded is distrusted as it arrives
        if value.handed_out or value.number in self.tainted or call is None:
            level = Level.BANNED
        elif value.number in self._table.undefined:
            return
        if level == Level.NONE or storage.nbytes() == 0:
            return
        value.witness = witness = new_witness(key, level)
        if level != Level.WHOLE:
            witness.take(storage)
        if level == Level.SAMPLE:
            return
        witness.storage = storage
        value.size_bytes = storage.nbytes()
        self.pending[value.number] = value
        self._cursor.needs_attention = True
        if level >= Level.COPIED:
            place = self._copies.place(value.number, value.size_bytes)
            if place is not None:
                witness.start_copy(place, storage)
                self._stats.verified_bytes += value.size_bytes

    def distrust(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Have a value that autograd has saved leave by copy in this step, as the program has its address from now on.

        Args:
            value: The value.
            storage: Its bytes, which the program holds.
        """
        witness = value.witness
        if witness is None or witness.level == Level.BANNED or value.storage is not None:
            return
        self.end(value)
        value.witness = None
        self.saved(value, storage)

    def copied(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Begin to watch a swapped value that is about to be copied, if it may change before the program releases it.

        It may if the program has its address, and nobody knows until its plan was followed a few times.
        """
        if self.looks_at(value):
            value.witness = new_witness(self._table.key(value.number), Level.WHOLE)
            value.witness.take(storage)

    def looks_at(self, value: Value) -> bool:
        """Whether a swapped value is looked at before its bytes are freed. May be asked again."""
        return value.handed_out or self.verification.level(self._table.key(value.number)) >= Level.COPIED

    def looked_at(self, numbers: Iterable[int]) -> set[int]:
        """Return those of some swapped values that are looked at in this step, if nobody obtains their address."""
        keys = {number: self._table.key(number) for number in numbers}
        settled = self.verification.settled(keys.values())
        return {number for number, key in keys.items() if key not in settled}

    def sampled(self, numbers: Iterable[int]) -> dict[int, bool]:
        """Return those of some recomputed values on a CPU of which a sample is compared in this step, or nothing.

        Args:
            numbers: The values.

        Returns:
            For each of them whether there is a sample, if nobody obtains its address.
        """
        keys = {number: self._table.key(number) for number in numbers if number not in self._table.foreign}
        settled = self.verification.sampled(keys.values())
        are_on = self.verification.is_on
        return {
            number: are_on and number not in self._table.undefined for number, key in keys.items() if key in settled
        }

    def has_changed(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Whether a swapped value has changed since `copied`; it is watched in all later steps then."""
        witness, value.witness = value.witness, None
        assert witness is not None
        if witness.agrees(storage):
            self.verification.copy_matched(witness)
            return False
        self.verification.copy_differed(witness)
        return True

    def settle(self) -> None:
        """Let go of what only this step holds by now."""
        for value in list(self.pending.values()):
            witness = value.witness
            assert witness is not None
            storage = witness.storage
            assert storage is not None
            if not is_held_elsewhere(storage):
                del storage
                self.leave(value)

    def settle_all(self) -> None:
        """Let go of everything: what happens to it from here on is not seen."""
        for value in list(self.pending.values()):
            self.leave(value)

    def leave(self, value: Value) -> None:
        """Remember a value's bytes as they are now, and let go of them. A banned one goes only if there is a copy."""
        self.pending.pop(value.number, None)
        witness = value.witness
        if witness is None or witness.storage is None:
            return
        storage = witness.storage
        self._stats.host_stall_ms += witness.leave(storage)
        if witness.level == Level.BANNED:
            if witness.place is None:
                value.storage, value.is_pinned = storage, True
            else:
                value.place, value.is_copied = witness.place, True

    def end(self, value: Value) -> None:
        """Forget a value that nothing will read any more."""
        self.pending.pop(value.number, None)
        if value.witness is not None and value.witness.storage is not None:
            self._stats.host_stall_ms += value.witness.finish_copy()
            value.witness.storage = None

    def is_banned(self, value: Value) -> bool:
        """Whether a value is not replayed."""
        return value.witness is not None and value.witness.level == Level.BANNED

    def check(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs.

        Raises:
            ReplayDiffers: If it differs and there is no copy.
        """
        witness = value.witness
        if witness is not None and witness.storage is None:
            self.verification.compare(witness, storage, partial(self._difference, value))

    @property
    def has_copies(self) -> bool:
        """Whether there is a copy of any value of the step."""
        return self._copies.is_open

    def has_copy(self, value: Value) -> bool:
        """Whether there is a copy of a value that is otherwise replayed."""
        return value.witness is not None and value.witness.place is not None

    def recover(self, value: Value, storage: torch.UntypedStorage, *, is_different: bool) -> None:
        """Fill a storage with the copy of a value that cannot be replayed.

        Args:
            value: The value.
            storage: The storage.
            is_different: Whether its replay would give something else, so that it is banned.

        Raises:
            ReplayDiffers: If the copy is not what was written.
        """
        assert value.witness is not None
        if is_different or not value.witness.restore(storage):
            self.verification.restore(value.witness, storage, partial(self._difference, value))

    def ban(self, values: Iterable[Value]) -> None:
        """Have values leave by copy in later steps, as they cannot be replayed in this one and there is no copy."""
        for value in values:
            witness = value.witness or new_witness(self._table.key(value.number), Level.SAMPLE)
            self.verification.differed(witness, self._difference(value, False))

    def _difference(self, value: Value, was_survived: bool) -> Difference:
        call = self._call_of(value.number)
        cause = "it is not known" if call is None else cause_of(call.call)
        operator = "an op" if call is None else operator_facts(call.call.func).name
        return Difference(operator, self._table.modules.get(value.number, ""), cause, was_survived)


def cause_of(call: Any) -> str:
    """Return why a replay of a call most likely gave other bits."""
    return likely_cause(call.func, operator_facts(call.func).random, call.reads_outside)
