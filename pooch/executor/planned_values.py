"""The values of a step that its plan moves, and where each of them is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..ground.errors import PlanMismatch, ReplayDiffers
from ..ir import Action
from ..machine import Call, Recipes, Value
from ..machine.recipes import Resolve
from ..machine.values import Owner, Place
from ..torchtools.effects import StorageMap
from ..torchtools.tensors import storage_of
from ..torchtools.watch import copied_storage
from .cursor import Cursor
from .emptied import EmptiedStorages
from .engines.protocol import Arena
from .evictor import Evictor
from .leaving import FixedPlace, Leaving, StepCopies
from .memory import is_held_elsewhere
from .planned_calls import PlannedCalls
from .records import Handle, Hold, handle_on
from .replay import replay_call
from .table import ActionTable

ANEW = ": profile and plan this step again"  # what to do where a plan does not suit a step


class PlannedValues:
    """The values that a plan moves in one step: it makes the moves of its schedule, and any value available when read.

    Args:
        table: The plan, indexed for lookups. Also an attribute.
        arena: Room in the swap tier for what it swaps.
        evictor: Makes the moves, under its lock.
        recipes: The calls of the step. What replays will read is held in their `sources`.
        owner: What the machine asks about the values.
        cursor: Is told what has to be looked at before the next op. Also an attribute.

    Attributes:
        planned: Maps the number of each swapped or recomputed value to the value.
        held: Maps values that replays will read to their storages.
        emptied: Values whose bytes are away while the program still holds them.
        leaving: What replays are compared with.
        calls: The calls that it replays.
        lent: Holds on what replays may read, once the step has left the plan.
        held_back: Values that were copied, while the program may still change them.
        to_drop: Numbers of values that the schedule holds until replays have read them.
        arena, health, store, lock, stats: Where values are copied to, what is wrong with it, what makes the moves, the
            lock of the step, and its counters.
        asks: Whether allocations ask for room by themselves.
    """

    def __init__(
        self, table: ActionTable, arena: Arena, evictor: Evictor, recipes: Recipes, owner: Owner, cursor: Cursor
    ) -> None:
        self.table, self.arena, self.stats, self.cursor = table, arena, evictor.stats, cursor
        self._evictor, self._recipes, self.store = evictor, recipes, evictor.store
        self.lock, self.health, self.asks = evictor.lock, evictor.engine.health, evictor.live.asks
        self.planned = {number: Value(number, owner) for number in table.swapped | table.recomputed}
        self.held = recipes.sources = cursor.sources
        self._made = cursor.made
        self.to_drop = set(table.dropped)
        self.held_back: dict[int, Value] = {}
        self.emptied = EmptiedStorages(self.stats, recipes.make_again, self.health, cursor)
        self._copies = StepCopies(evictor.engine, table.copies)
        self.leaving = Leaving(evictor.verification, self._copies, table.copies, self.stats, recipes.of, cursor)
        self.calls = PlannedCalls(table, cursor, self.leaving.tainted)
        recipes.arriving = self.calls.arrived
        self.lent: dict[int, Hold] = {}  # by the numbers of their values
        recipes.may_go, recipes.stays = self.planned.__contains__, self.lent.__contains__

    def __contains__(self, number: int | None) -> bool:
        return number in self.planned

    def close(self) -> None:
        """Release the room of the step."""
        self._copies.close()
        self.arena.close()

    # What the program and autograd do ---------------------------------------------------------------------------------

    def made(self, number: int, storage: torch.UntypedStorage) -> None:
        """Register a value that an op of the forward pass has produced, as far as the plan needs it."""
        if number in self.table.sources:
            self.held[number] = storage
        elif number in self.table.swapped:
            _put_into(self.planned[number], storage)
        if number in self.table.emptied or number in self.table.from_gathered:
            self.planned[number].home = weakref.ref(storage)

    def hold(self, step: object, value: Value, tensor: torch.Tensor, *, is_planned: bool = True) -> Handle:
        """Return the handle that autograd holds in place of a tensor on a planned value.

        Autograd may save a value again after releasing it. The tier's copy may then have been overwritten by another
        value, so the storage at hand is kept unless the plan empties it. What an op that is not planned saves may be
        read at another time than planned, when the gathered parameters that it is made from are not there: it is kept.
        """
        with self.lock:
            if value.number in self.table.from_gathered and not is_planned:
                _put_into(value, storage_of(tensor))
            self._take_made(value)
            here = not value.is_copied or value.number in self.table.emptied
            if value.storage is None and value.number in self.table.swapped and here:
                _put_into(value, storage_of(tensor))
            value.in_program = weakref.ref(storage_of(tensor))
            if value.storage is None and value.witness is None and value.number in self.table.recomputed:
                self.leaving.saved(value, storage_of(tensor))
            return handle_on(step, value, tensor, self.lock.end)

    def _take_made(self, value: Value) -> None:
        """Take over a value that the native watch holds since it was made."""
        storage = self._made.pop(value.number, None)
        if storage is not None and value.storage is None:
            _put_into(value, storage)

    def protect(self, number: int | None, storage: torch.UntypedStorage) -> bool:
        """Prepare for an op that writes over a value: finish its copy, and have it stay.

        Later replays must not read the new contents. No op that is planned writes over what they will read, so the
        step is leaving its path, and they get a copy, until the step ends. What autograd has saved of the value stays
        from now on: its version counters tell whether it may still be read, and then the new contents are what plain
        training reads, as after a write through `tensor.data`.

        Returns whether that was all that is to be done about it.
        """
        if number is None:
            return False
        with self.lock:
            held = self.held.pop(number, None)
            if held is not None and number in self.to_drop:
                self.held[number] = copied_storage(held)
            value = self.planned.get(number)
            if value is None:
                return number in self.lent and self._has_parted(self.lent[number].value, storage)
            self._take_made(value)
            if value.ticket is not None:
                self.stats.host_stall_ms += value.ticket.wait()
            if value.handles:
                if number not in self.held and self.table.is_read_again(number):
                    self.held[number] = copied_storage(storage)
                self._pin(value, storage)
            else:
                self.end_copy_out(value)
                self._let_go(value)
        return True

    def _has_parted(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Have a value that replays alone will read keep its contents, as the storage that it was in is written over.

        Returns False if autograd has saved it too.
        """
        if value.handles > 1:
            return False
        if value.storage is not None and value.storage._cdata == storage._cdata:
            self.store.settle(value)
            self.store.forget_copy(value)
            value.is_busy = True  # the copy may need room
            try:
                value.storage = copied_storage(storage)
            finally:
                value.is_busy = False
        return True

    def _pin(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Keep a value's storage, whose contents may change, until autograd has released it."""
        if value.is_pinned:
            return
        self.end_copy_out(value)
        self.leaving.end(value)
        self.held_back.pop(value.number, None)
        value.witness, value.is_pinned, value.is_copied = None, True, False
        value.storage, value.handed_out = storage, True

    def keep_what_is_held(self) -> None:
        """Keep what is made from gathered parameters and still held by the program, as the step leaves the path.

        The op at which it does so may have saved such a value, which autograd does before the op runs.
        """
        with self.lock:
            for number in self.table.from_gathered:
                value = self.planned[number]
                if value.storage is None and value.handles:
                    value.storage = value.home()

    def hand_out(self, arguments: Any, values: StorageMap) -> None:
        """Keep the arguments in place from now on, since the program obtains their address."""
        self.emptied.hand_out(arguments, values, self.planned)

    def distrust(self, numbers: set[int]) -> None:
        """Have values leave by copy in this step, and those that are made from them, as far as they are still there.

        Args:
            numbers: Those that the program has the address of, so that they may change and nothing tells.
        """
        with self.lock:
            self.leaving.tainted |= numbers
            for call in self._recipes.calls():
                self.calls.taint(call)
            for number in self.leaving.tainted & self.planned.keys():
                value = self.planned[number]
                there = value.in_program()
                if there is not None:
                    self.leaving.distrust(value, there)

    def is_at_its_end(self, number: int) -> bool:
        """Whether the handle that is being read is the last one on a value, and no replay will read it."""
        with self.lock:
            value = self.planned.get(number)
            if number in self.held or number in self.to_drop:
                return False
            return value is None or (value.handles <= 1 and value.ticket is None)

    def released(self, value: Value) -> None:
        """Release a value with autograd's last handle, unless the plan will have a later replay read it."""
        if value.number not in self.to_drop or not self.cursor.on_path:
            self._let_go(value)

    def ensure(self, value: Value) -> torch.UntypedStorage:
        """Return a value's storage on the device, whatever the schedule has done so far."""
        here: torch.UntypedStorage | None = value.storage
        if here is not None and value.ticket is None and not self.emptied.away and value.in_program() is None:
            return here
        self._take_made(value)
        if self.emptied.away and self.emptied.is_away(value):
            self.emptied.bring_back(value)
            value.storage = value.home()
        held = self._held_by_program(value)
        if held is not None:
            self.wait(value)
            value.storage = held
        try:
            self._evictor.ensure(value)
        except (ReplayDiffers, PlanMismatch) as error:
            if not self._recover([value], is_different=isinstance(error, ReplayDiffers)):
                raise
        if self.emptied.away:
            self.emptied.arrived(value)
        storage: torch.UntypedStorage | None = value.storage
        assert storage is not None
        return storage

    # The moves of the schedule ----------------------------------------------------------------------------------------

    def copy_out(self, value: Value) -> None:
        """Start to copy a value to its room in the tier.

        Raises:
            PlanMismatch: If it is larger than that.
        """
        self._take_made(value)
        if value.storage is None:
            value.storage = value.home()  # released by autograd, but the program may have it saved again
        if value.storage is None:
            return  # released by the program before autograd saved it
        size_bytes = value.storage.nbytes()
        if size_bytes > self.table.room_bytes[value.number] and not self.table.has_any_sizes:
            raise PlanMismatch(
                f"value {value.number} has {size_bytes} bytes, but the plan has room for "
                f"{self.table.room_bytes[value.number]} of them in the tier{ANEW}"
            )
        if value.is_copied or value.ticket is not None:
            return  # it had to leave before its time, and the tier has it
        self.leaving.copied(value, value.storage)
        if value.witness is not None:
            self._evictor.forget(value)  # it is looked at again before it goes
        self._start_out(value, size_bytes)

    def _start_out(self, value: Value, size_bytes: int) -> None:
        """Start to copy a value to its room, or to any where it is larger. Without one it stays."""
        owner = value.owner()
        place: Place | None = None
        if size_bytes <= self.table.room_bytes[value.number]:
            place = FixedPlace(self.arena, self.table.offsets[value.number], self.health)
        elif owner is not None:
            place = owner.take_place(size_bytes)
        if place is not None:
            self.store.start_out(value, place, self.stats)

    def free(self, value: Value) -> None:
        """Free the bytes of a value that was copied, as soon as they cannot change any more."""
        self.end_copy_out(value)
        if not value.is_copied or value.ticket is not None or value.is_pinned:
            return
        if value.witness is None or value.storage is None:
            value.storage = None
        else:
            self.held_back[value.number] = value
            self.cursor.needs_attention = True
            self._settle_copied(everything=False)

    def _is_still_copied(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Whether the tier has a swapped value as it is now. What may have changed since it was copied is looked at
        once more before its bytes are freed, and copied again if it has.
        """
        self.held_back.pop(value.number, None)
        is_watched = value.witness is not None and not self.leaving.is_banned(value)
        if is_watched and self.leaving.has_changed(value, storage):
            value.storage = storage
            self.store.forget_copy(value)
            self._start_out(value, storage.nbytes())
            self.end_copy_out(value)
        return value.is_copied

    @property
    def waits_for_program(self) -> bool:
        """Whether values are to leave as soon as the program has released them."""
        return bool(self.leaving.pending or self.held_back)

    def awaited(self) -> list[torch.UntypedStorage]:
        """Return the storages that are to leave as soon as the program has released them."""
        witnesses = (value.witness for value in list(self.leaving.pending.values()))
        pending = [witness.storage for witness in witnesses if witness is not None]
        held_back = [value.storage for value in list(self.held_back.values())]
        return [storage for storage in (*pending, *held_back) if storage is not None]

    def settle(self) -> None:
        """Let go of what only this step holds by now. The caller holds the lock."""
        self.leaving.settle()
        self._settle_copied(everything=False)

    def settle_all(self) -> None:
        """Let go of all that is to leave: what happens to it from here on is not seen. The caller holds the lock."""
        self.leaving.settle_all()
        self._settle_copied(everything=True)

    def _settle_copied(self, *, everything: bool) -> None:
        """Free what was copied, once it cannot change any more; copy it again if it has changed since."""
        for value in list(self.held_back.values()):
            storage = value.storage
            if storage is None or (not everything and is_held_elsewhere(storage)):
                continue
            if self._is_still_copied(value, storage) and not value.is_pinned:
                value.storage = None

    def empty(self, value: Value) -> None:
        """Free the bytes of a value that the program holds."""
        self.end_copy_out(value)
        if value.is_copied or value.number in self.table.recomputed:
            self.wait(value)
            home = value.home()
            if value.witness is None and home is not None and value.number in self.table.recomputed:
                self.leaving.saved(value, home)
            self.leaving.leave(value)
            if home is None or not value.is_copied or self._is_still_copied(value, home):
                self.emptied.empty(value)

    def end_copy_out(self, value: Value) -> None:
        """Wait for a pending copy out. If the copy failed, the value stays on the device."""
        if value.ticket is None or value.is_copied:
            return
        self.stats.host_stall_ms += self.store.finish_out(value, self.stats)
        if not value.is_copied:
            self.stats.kept_bytes += value.size_bytes

    def copy_in(self, value: Value) -> None:
        """Start to bring a value back."""
        if value.storage is None and value.is_copied and self._is_wanted(value):
            self.store.start_in(value, self.stats)

    def _is_wanted(self, value: Value) -> bool:
        return value.handles > 0 or value.number in self.to_drop

    def wait(self, value: Value) -> None:
        """Wait until a value is back."""
        if value.ticket is None or not value.is_copied:
            return  # no copy in is pending
        self.store.finish_in(value, self.stats)
        if self.emptied.away:
            self.emptied.arrived(value)

    def drop(self, number: int) -> None:
        """End the schedule's hold on a value."""
        self.held.pop(number, None)
        self.to_drop.discard(number)
        value = self.planned.get(number)
        if value is not None and value.handles == 0:
            self._let_go(value)

    def _let_go(self, value: Value) -> None:
        """Release the storage once no copy reads or fills it."""
        self._take_made(value)
        self.end_copy_out(value)  # so that the tier has it if the program has it saved again
        self.leaving.end(value)
        self.held_back.pop(value.number, None)
        self.store.settle(value)
        value.storage = None

    # Replays ----------------------------------------------------------------------------------------------------------

    def replay(self, action: Action, call: Call) -> None:
        """Run a call again, and keep those of its results that the schedule names."""
        values = [self.planned.get(number) for number in action.outputs]
        if values and all(value is not None and self.leaving.is_banned(value) for value in values):
            for value in values:
                assert value is not None
                self.copy_in(value)
            return
        try:
            storages = replay_call(call.call, lambda number, written: self._resolve(number, written, action.in_place))
        except (ReplayDiffers, PlanMismatch) as error:
            if not self._recover(values, is_different=isinstance(error, ReplayDiffers)):
                if isinstance(error, ReplayDiffers):
                    self.leaving.ban(value for value in values if value is not None)
                raise
            return
        self.stats.recomputed_ops += 1
        for number, storage in zip(call.writes, storages, strict=True):
            if number in action.outputs:
                self.put(number, storage)

    def put(self, number: int, storage: torch.UntypedStorage) -> None:
        """Keep what a replay gave, if it is wanted."""
        value = self.planned.get(number)
        if value is None:
            self.held[number] = storage
        elif self._is_wanted(value) and value.storage is None and not self.leaving.is_banned(value):
            held = self._held_by_program(value)
            if held is None:
                self.leaving.check(value, storage)
            _put_into(value, storage if held is None else held)

    def _held_by_program(self, value: Value) -> torch.UntypedStorage | None:
        """The storage that autograd has saved, if the program still holds it: plain training reads what is there."""
        found = value.in_program()
        return found if found is not None and found.nbytes() > 0 else None

    def _recover(self, values: list[Value | None], *, is_different: bool) -> bool:
        """Take the copies of values that cannot be replayed, and return whether the step can go on.

        It cannot if there is no copy of one that is wanted. What else the op has made is read by further replays alone,
        which will fail too, and each take its copy.

        Args:
            values: The values.
            is_different: Whether their replays would give something else, rather than nothing at this time.
        """
        wanted = [value for value in values if value is not None and self._is_wanted(value)]
        if not all(map(self.leaving.has_copy, wanted)) or not (wanted or self.leaving.has_copies):
            return False
        for value in wanted:
            value.storage = self._evictor.memory.new(value.size_bytes)
            self.leaving.recover(value, value.storage, is_different=is_different)
        return True

    def _resolve(self, number: int, written: bool, in_place: tuple[int, ...]) -> torch.UntypedStorage:
        """Return the storage of a value for a replay.

        An op that writes into a value gets a copy, unless the schedule says that the old contents are not needed: a
        step with the same ops may write over a different value than the profiled one did.
        """
        if written and number in in_place and number in self.held:
            return self.held.pop(number)
        storage, value = self.held.get(number), self.planned.get(number)
        if storage is not None and self.emptied.away and value is not None:
            self.emptied.bring_back(value)
        if storage is None:
            if value is None:
                raise _lost(number)
            storage = self.ensure(value)
        return copied_storage(storage) if written else storage

    def resolve_emptied(self, resolve: Resolve, number: int, written: bool) -> torch.UntypedStorage:
        """Return the storage of a value for a replay, which may be held for that while it is empty."""
        value = self.planned.get(number)
        if value is not None and number in self.held:
            self.emptied.bring_back(value)
        storage: torch.UntypedStorage = resolve(number, written)
        return storage

    # Pressure ---------------------------------------------------------------------------------------------------------

    def may_leave(self) -> list[Value]:
        """Return the values that are here and may leave ahead of the schedule, or without one, in the order in which
        they were made. They come back when they are read.

        What may have changed since it was copied, and is to be looked at before it goes, stays with the plan.
        """
        here = (value for _, value in sorted(self.planned.items()) if value.storage is not None)
        return [value for value in here if value.handles and not value.is_pinned and self._is_settled(value)]

    def taken_from_replays(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Take back what is held for replays, and yield it with the numbers of its values."""
        for number in sorted(self.table.sources):
            storage = self.held.pop(number, None)
            if storage is not None:
                yield number, storage
        for number in sorted(self.to_drop & self.planned.keys()):
            value = self.planned[number]
            self._take_made(value)
            if value.storage is not None and not value.is_pinned and self._is_settled(value):
                yield number, value.storage

    def _is_settled(self, value: Value) -> bool:
        """Whether nothing is left to compare of a value that is here: it was never away, or its replay is checked."""
        if value.witness is None:
            return True
        return value.number in self.table.recomputed and not self.leaving.is_banned(value)


def _put_into(value: Value, storage: torch.UntypedStorage) -> None:
    value.storage = storage
    value.size_bytes = storage.nbytes() or value.size_bytes  # an emptied one has none until it is refilled


def _lost(number: int) -> PlanMismatch:
    return PlanMismatch(
        f"the backward pass needs value {number} again, but the plan neither holds it nor replays the op that produces "
        f"it{ANEW}"
    )
