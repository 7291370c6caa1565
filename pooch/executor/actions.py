"""Carries out the actions of a schedule and tracks where each value of the step is."""

from __future__ import annotations

import weakref
from typing import assert_never

import torch

from ..errors import PlanMismatch, ReplayDiffers
from ..ir import Action
from ..machine import CopySpeed, StepLock, Store, Value
from ..torchtools.endings import end_with
from ..torchtools.tensors import copied_storage, new_storage, storage_of
from .emptied import EmptiedStorages
from .engines.protocol import Arena, CopyEngine
from .leaving import FixedPlace, Leaving, StepCopies
from .memory import DeviceMemory, is_held_elsewhere
from .records import Handle
from .replay import RecordedCall, find_made, is_emptied, replay_call
from .silence import Silence
from .statistics import RunStats, WarnOnce
from .table import ActionTable
from .verification import Verification


class StepActions:
    """Runs the actions of each slot once, and makes any value available on the device on request.

    All arguments are also attributes.

    Args:
        table: The plan, indexed for lookups.
        arena: The step's room in the swap tier.
        device: Where values are needed.
        stats: Counters of the step, updated in place.
        warn_once: Reports steps that leave the path.
        verification: What is known of the plan's recipes.
        engine: Opens room for copies of values whose recipes are not proven.

    Attributes:
        planned: Maps the number of each swapped or recomputed value to the value.
        store: Makes the moves.
        held: Maps values that replays will read to their storages.
        calls: Maps the slots of ops that may be replayed to their recorded calls.
        emptied: Values whose bytes are away while the program still holds them.
        leaving: What replays are compared with.
        lock: Guards all of the above, except for entries that only the forward pass adds.
    """

    def __init__(
        self,
        table: ActionTable,
        arena: Arena,
        device: torch.device,
        stats: RunStats,
        warn_once: WarnOnce,
        verification: Verification,
        engine: CopyEngine,
    ) -> None:
        self.table, self.arena, self.device, self.stats = table, arena, device, stats
        self.warn_once = warn_once
        self._health = engine.health
        self.store = Store(DeviceMemory(device), engine.health, CopySpeed(engine.description))
        self.silence = Silence(lambda text: warn_once(text, text))
        self.lock = StepLock(self._handle_ended)
        self.planned = {number: Value(number) for number in table.swapped | table.recomputed}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.calls: dict[int, RecordedCall] = {}
        self._to_drop = set(table.dropped)
        self._held_back: dict[int, Value] = {}  # copied, while the program may still change them
        self._acted: set[int] = set()
        self._done: set[int] = set()
        self._replays_ahead = set(table.replay_slots)
        make_again = weakref.WeakMethod(self._make_again)  # a reference cycle would wait for the collector
        self.emptied = EmptiedStorages(stats, make_again, engine.health)
        copies = StepCopies(engine, table.copies)
        calls, producer_of = self.calls, table.producer_of  # not this object, which would hold itself
        self.leaving = Leaving(
            verification, copies, table.copies, stats, lambda number: calls.get(producer_of.get(number, -1))
        )
        end_with(self, copies.close)
        end_with(self, arena.close)

    def is_due(self, slot: int) -> bool:
        """Whether the slot's actions have not finished; another thread may be running them."""
        return slot not in self._done

    def act(self, slot: int) -> None:
        """Run the actions at the entry of a slot once. A second caller waits until they have finished."""
        with self.lock:
            if slot in self._acted:
                return
            self._acted.add(slot)
            self._replays_ahead.discard(slot)
            actions = self.table.actions.get(slot, ())
            # Without the parameters that replays read, they wait until their results are read: they may be there then.
            are_gathered = self._are_gathered(actions)
            for action in actions:
                if are_gathered or action.kind not in ("replay", "drop"):
                    self._do(action)
            self._done.add(slot)

    def _are_gathered(self, actions: tuple[Action, ...]) -> bool:
        """Whether FSDP has filled the storages that the replays of a slot read, as it had when it was profiled."""
        if not self.table.gathered:
            return True
        calls = (self.calls.get(action.target) for action in actions if action.kind == "replay")
        return not any(is_emptied(call) for call in calls if call is not None)

    def protect(self, number: int | None, storage: torch.UntypedStorage) -> None:
        """Prepare for an op that writes over a value: finish its copy, and remember that it changed.

        Later replays must not read the new contents, so the value is no longer held for them. What autograd has saved
        of it stays from now on: its version counters tell whether it may still be read, and then the new contents are
        what plain training reads, as after a write through `tensor.data`.
        """
        if number is None:
            return
        with self.lock:
            self.held.pop(number, None)
            value = self.planned.get(number)
            if value is None:
                return
            value.changed = value.handles > 0
            if value.ticket is not None:
                self.stats.host_stall_ms += value.ticket.wait()
            if value.handles:
                self._pin(value, storage)
            else:
                self._end_copy_out(value)
                self._let_go(value)

    def _pin(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Keep a value's storage, whose contents may change, until autograd has released it."""
        if value.is_pinned:
            return
        self._end_copy_out(value)
        self.leaving.end(value)
        self._held_back.pop(value.number, None)
        value.witness, value.is_pinned, value.is_copied = None, True, False
        value.storage, value.handed_out = storage, True

    def made(self, number: int, storage: torch.UntypedStorage) -> None:
        """Register a value that an op of the forward pass has produced, as far as the plan needs it."""
        if number in self.table.sources:
            self.held[number] = storage
        elif number in self.table.swapped:
            self.planned[number].storage = storage
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
                value.storage = storage_of(tensor)
            here = not value.is_copied or value.number in self.table.emptied
            if value.storage is None and value.number in self.table.swapped and here:
                value.storage = storage_of(tensor)
            value.in_program = weakref.ref(storage_of(tensor))
            if value.storage is None and value.witness is None and value.number in self.table.recomputed:
                self.leaving.saved(value, storage_of(tensor))
            return Handle(step, value, tensor, self.lock.end)

    def keep_what_is_held(self) -> None:
        """Keep what is made from gathered parameters and still held by the program, as the step leaves the path.

        The op at which it does so may have saved such a value, which autograd does before the op runs.
        """
        with self.lock:
            for number in self.table.from_gathered:
                value = self.planned[number]
                if value.storage is None and value.handles:
                    value.storage = value.home()

    def distrust(self, numbers: set[int]) -> None:
        """Have values leave by copy in this step, and those that are made from them, as far as they are still there.

        Args:
            numbers: Those that the program has the address of, so that they may change and nothing tells.
        """
        with self.lock:
            self.leaving.tainted |= numbers
            for slot, call in sorted(self.calls.items()):
                self.taint(slot, call)
            for number in self.leaving.tainted & self.planned.keys():
                value = self.planned[number]
                there = value.in_program()
                if there is not None:
                    self.leaving.distrust(value, there)

    def taint(self, slot: int, call: RecordedCall) -> None:
        """Distrust what an op makes, if it reads what is distrusted."""
        tainted = self.leaving.tainted
        if tainted and any(read.value in tainted for read in find_made(call)):
            tainted.update(self.table.expected[slot - self.table.first_slot].writes)

    def is_at_its_end(self, number: int) -> bool:
        """Whether the handle that is being read is the last one on a value, and no replay will read it."""
        with self.lock:
            value = self.planned.get(number)
            if number in self.held or number in self._to_drop:
                return False
            return value is None or (value.handles <= 1 and value.ticket is None)

    def _handle_ended(self, value: Value) -> None:
        """Release the value with autograd's last handle, unless a later replay reads it."""
        value.handles -= 1
        if value.handles == 0 and value.number not in self._to_drop:
            self._let_go(value)

    def ensure(self, value: Value) -> torch.UntypedStorage:
        """Return a value's storage on the device, whatever the schedule has done so far."""
        if self.emptied.away and self.emptied.is_away(value):
            self.emptied.bring_back(value)
            value.storage = value.home()
        held = self._held_by_program(value)
        if value.storage is not None or held is not None:
            self._wait(value)
            value.storage = value.storage if held is None else held
            assert value.storage is not None
            return value.storage
        self.stats.late_swaps += 1
        if value.is_copied:
            self.store.start_in(value, self.stats)
            self._wait(value)
        else:
            try:
                value.storage = self._make_again(value.number)
            except (ReplayDiffers, PlanMismatch) as error:
                if not self._recover([value], is_different=isinstance(error, ReplayDiffers)):
                    raise
        assert value.storage is not None
        return value.storage

    def _do(self, action: Action) -> None:
        match action.kind:
            case "replay":
                self._replay(action)
            case "drop":
                self._drop(action)
            case "copy_out":
                self._copy_out(self.planned[action.target])
            case "free":
                self._free(self.planned[action.target])
            case "empty":
                self._empty(self.planned[action.target])
            case "refill":
                self.emptied.refill(self.planned[action.target])
            case "copy_in":
                self._copy_in(self.planned[action.target])
            case "wait":
                self._wait(self.planned[action.target])
            case unknown:
                assert_never(unknown)

    def _copy_out(self, value: Value) -> None:
        if value.storage is None:
            value.storage = value.home()  # released by autograd, but the program may have it saved again
        if value.storage is None:
            return  # released by the program before autograd saved it
        size_bytes = value.storage.nbytes()
        if size_bytes > self.table.room_bytes[value.number]:
            raise PlanMismatch(
                f"value {value.number} has {size_bytes} bytes, but the plan has room for "
                f"{self.table.room_bytes[value.number]} of them in the tier: profile and plan this step again"
            )
        if value.is_copied or value.ticket is not None:
            return  # it had to leave before its time, and the tier has it
        self.leaving.copied(value, value.storage)
        self._start_out(value)

    def _start_out(self, value: Value) -> None:
        place = FixedPlace(self.arena, self.table.offsets[value.number], self._health)
        self.store.start_out(value, place, self.stats)

    def _free(self, value: Value) -> None:
        self._end_copy_out(value)
        if not value.is_copied or value.ticket is not None or value.is_pinned:
            return
        if value.witness is None or value.storage is None:
            value.storage = None
        else:
            self._held_back[value.number] = value
            self._settle_copied(everything=False)

    def _is_still_copied(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Whether the tier has a swapped value as it is now. What may have changed since it was copied is looked at
        once more before its bytes are freed, and copied again if it has.
        """
        self._held_back.pop(value.number, None)
        is_watched = value.witness is not None and not self.leaving.is_banned(value)
        if is_watched and self.leaving.has_changed(value, storage):
            value.storage = storage
            self.store.forget_copy(value)
            self._start_out(value)
            self._end_copy_out(value)
        return value.is_copied

    @property
    def waits_for_program(self) -> bool:
        """Whether values are to leave as soon as the program has released them."""
        return bool(self.leaving.pending or self._held_back)

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
        for value in list(self._held_back.values()):
            storage = value.storage
            if storage is None or (not everything and is_held_elsewhere(storage)):
                continue
            if self._is_still_copied(value, storage) and not value.is_pinned:
                value.storage = None

    def _empty(self, value: Value) -> None:
        self._end_copy_out(value)
        if value.is_copied or value.number in self.table.recomputed:
            self._wait(value)
            home = value.home()
            if value.witness is None and home is not None and value.number in self.table.recomputed:
                self.leaving.saved(value, home)
            self.leaving.leave(value)
            if home is None or not value.is_copied or self._is_still_copied(value, home):
                self.emptied.empty(value)

    def _end_copy_out(self, value: Value) -> None:
        """Wait for a pending copy out. If the copy failed, the value stays on the device."""
        if value.ticket is None or value.is_copied:
            return
        self.stats.host_stall_ms += self.store.finish_out(value, self.stats)
        if not value.is_copied:
            self.stats.kept_bytes += value.size_bytes

    def _copy_in(self, value: Value) -> None:
        if value.storage is None and value.is_copied and self._is_wanted(value):
            self.store.start_in(value, self.stats)

    def _is_wanted(self, value: Value) -> bool:
        return value.handles > 0 or value.number in self._to_drop

    def _wait(self, value: Value) -> None:
        if value.ticket is None or not value.is_copied:
            return  # no copy in is pending
        self.store.finish_in(value, self.stats)
        if self.emptied.away:
            self.emptied.arrived(value)

    def _drop(self, action: Action) -> None:
        """End the schedule's hold on a value, unless slots run out of order and an earlier replay is still to come."""
        number, table = action.target, self.table
        may_be_read = number in table.sources or number in table.swapped or number in table.recomputed
        if may_be_read and any(slot < action.slot for slot in self._replays_ahead):
            return
        self.held.pop(number, None)
        self._to_drop.discard(number)
        value = self.planned.get(number)
        if value is not None and value.handles == 0:
            self._let_go(value)

    def _let_go(self, value: Value) -> None:
        """Release the storage once no copy reads or fills it."""
        self._end_copy_out(value)  # so that the tier has it if the program has it saved again
        self.leaving.end(value)
        self._held_back.pop(value.number, None)
        self.store.settle(value)
        value.storage = None

    def _replay(self, action: Action) -> None:
        call = self.calls.get(action.target)
        if call is None:
            return  # the forward pass left the path before this op ran
        values = [self.planned.get(number) for number in action.outputs]
        if values and all(value is not None and self.leaving.is_banned(value) for value in values):
            for value in values:
                assert value is not None
                self._copy_in(value)
            return
        try:
            storages = replay_call(call, lambda number, written: self._resolve(number, written, action.in_place))
        except (ReplayDiffers, PlanMismatch) as error:
            if not self._recover(values, is_different=isinstance(error, ReplayDiffers)):
                if isinstance(error, ReplayDiffers):
                    self.leaving.ban(value for value in values if value is not None)
                raise
            return
        self.stats.recomputed_ops += 1
        expected = self.table.expected[action.target - self.table.first_slot]
        for number, storage in zip(expected.writes, storages, strict=True):
            if number in action.outputs:
                self._put(number, storage)

    def _put(self, number: int, storage: torch.UntypedStorage) -> None:
        value = self.planned.get(number)
        if value is None:
            self.held[number] = storage
        elif self._is_wanted(value) and value.storage is None and not self.leaving.is_banned(value):
            held = self._held_by_program(value)
            if held is None:
                self.leaving.check(value, storage)
            value.storage = storage if held is None else held

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
            value.storage = new_storage(value.size_bytes, self.device)
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

    def let_go(self, missing_bytes: int) -> int:
        """Free planned values ahead of the schedule, oldest first, and return how many bytes that frees.

        Only values that can come back go: those that the tier holds or has room for. None go while another thread works
        on the step, which may itself be waiting for the room that is made here.
        """
        freed_bytes = 0
        with self.lock.if_free() as is_free:
            for value in self.planned.values() if is_free else ():
                if freed_bytes >= missing_bytes:
                    break
                storage = value.storage
                if storage is None or not value.handles or value.changed or is_held_elsewhere(storage):
                    continue
                if value.is_copied:
                    self._wait(value)
                elif value.number in self.table.swapped:
                    if value.ticket is None:
                        self._copy_out(value)
                    self._end_copy_out(value)
                if value.is_copied:
                    freed_bytes += self.store.drop(value)
        return freed_bytes

    # Outside of the schedule ------------------------------------------------------------------------------------------

    def _make_again(self, number: int) -> torch.UntypedStorage:
        """Replay what a value depends on, sources first. Iterative, since a chain of replays may be long."""
        made: dict[int, torch.UntypedStorage] = {}
        stack = [number]
        while stack:
            call = self.calls.get(self.table.producer_of[stack[-1]])
            if call is None:
                raise _lost(stack[-1])
            missing = [read.value for read in find_made(call) if not self._at_hand(read.value, made)]
            if missing:
                stack.extend(missing)
                continue
            current = stack.pop()
            if not self._at_hand(current, made):
                self._replay_outside(current, made)
        return made[number]

    def _at_hand(self, number: int, made: dict[int, torch.UntypedStorage]) -> bool:
        value = self.planned.get(number)
        here = value is not None and (value.storage is not None or value.is_copied)
        return here or number in made or number in self.held

    def _replay_outside(self, number: int, made: dict[int, torch.UntypedStorage]) -> None:
        slot = self.table.producer_of[number]

        def resolve(read: int, written: bool) -> torch.UntypedStorage:
            storage = made.get(read)
            if storage is None:
                return self._resolve(read, written, ())
            return copied_storage(storage) if written else storage

        storages = replay_call(self.calls[slot], resolve)
        self.stats.recomputed_ops += 1
        for each, storage in zip(self.table.expected[slot - self.table.first_slot].writes, storages, strict=True):
            value = self.planned.get(each)
            if value is not None and value.number in self.table.recomputed:
                self.leaving.check(value, storage)
            made[each] = storage


def _lost(number: int) -> PlanMismatch:
    return PlanMismatch(
        f"the backward pass needs value {number} again, but the plan neither holds it nor replays the op that produces "
        "it: profile and plan this step again"
    )
