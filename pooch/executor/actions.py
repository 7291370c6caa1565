"""Carries out the actions of a schedule and tracks where each value of the step is."""

from __future__ import annotations

import weakref
from functools import partial
from typing import assert_never

import torch

from ..errors import PlanMismatch, ReplayDiffers, TierError
from ..ir import Action
from ..torchtools.endings import end_with
from ..torchtools.tensors import copied_storage, new_storage, storage_of
from .emptied import EmptiedStorages
from .engines.protocol import Arena, CopyEngine, Ticket
from .leaving import Leaving, StepCopies
from .lock import StepLock
from .records import PackedRecord, Record
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
        records: Maps each swapped or recomputed value to its state.
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
        self.silence = Silence(lambda text: warn_once(text, text))
        self.lock = StepLock(self._handle_ended)
        self.records = {value: Record(value) for value in table.swapped | table.recomputed}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.calls: dict[int, RecordedCall] = {}
        self._to_drop = set(table.dropped)
        self._held_back: dict[int, Record] = {}  # copied, while the program may still change them
        self._acted: set[int] = set()
        self._done: set[int] = set()
        self._replays_ahead = set(table.replay_slots)
        make_again = weakref.WeakMethod(self._make_again)  # a reference cycle would wait for the collector
        self.emptied = EmptiedStorages(partial(_copy_in, arena, table.offsets), stats, make_again, engine.health)
        copies = StepCopies(engine, table.copies)
        calls, producer_of = self.calls, table.producer_of  # not this object, which would hold itself
        self.leaving = Leaving(
            verification, copies, table.copies, stats, lambda value: calls.get(producer_of.get(value, -1))
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

    def protect(self, value: int | None, storage: torch.UntypedStorage) -> None:
        """Prepare for an op that writes over a value: finish its copy, and remember that it changed.

        Later replays must not read the new contents, so the value is no longer held for them. What autograd has saved
        of it stays from now on: its version counters tell whether it may still be read, and then the new contents are
        what plain training reads, as after a write through `tensor.data`.
        """
        if value is None:
            return
        with self.lock:
            self.held.pop(value, None)
            record = self.records.get(value)
            if record is None:
                return
            record.changed = record.handles > 0
            if record.ticket is not None:
                self.stats.host_stall_ms += record.ticket.wait()
            if record.handles:
                self._pin(record, storage)
            else:
                self._end_copy_out(record)
                self._let_go(record)

    def _pin(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Keep a value's storage, whose contents may change, until autograd has released it."""
        if record.is_pinned:
            return
        self._end_copy_out(record)
        self.leaving.end(record)
        self._held_back.pop(record.value, None)
        record.witness, record.is_pinned, record.copied_out = None, True, False
        record.storage, record.handed_out = storage, True

    def made(self, value: int, storage: torch.UntypedStorage) -> None:
        """Register a value that an op of the forward pass has produced, as far as the plan needs it."""
        if value in self.table.sources:
            self.held[value] = storage
        elif value in self.table.swapped:
            self.records[value].storage = storage
        if value in self.table.emptied or value in self.table.from_gathered:
            self.records[value].home = weakref.ref(storage)

    def hold(
        self, step: object, record: Record, tensor: torch.Tensor, *, is_planned: bool = True
    ) -> PackedRecord[Record]:
        """Return the handle that autograd holds in place of a tensor on a planned value.

        Autograd may save a value again after releasing it. The tier's copy may then have been overwritten by another
        value, so the storage at hand is kept unless the plan empties it. What an op that is not planned saves may be
        read at another time than planned, when the gathered parameters that it is made from are not there: it is kept.
        """
        with self.lock:
            if record.value in self.table.from_gathered and not is_planned:
                record.storage = storage_of(tensor)
            here = not record.copied_out or record.value in self.table.emptied
            if record.storage is None and record.value in self.table.swapped and here:
                record.storage = storage_of(tensor)
            record.in_program = weakref.ref(storage_of(tensor))
            if record.storage is None and record.witness is None and record.value in self.table.recomputed:
                self.leaving.saved(record, storage_of(tensor))
            return PackedRecord(step, record, tensor, self.lock.end)

    def keep_what_is_held(self) -> None:
        """Keep what is made from gathered parameters and still held by the program, as the step leaves the path.

        The op at which it does so may have saved such a value, which autograd does before the op runs.
        """
        with self.lock:
            for value in self.table.from_gathered:
                record = self.records[value]
                if record.storage is None and record.handles:
                    record.storage = record.home()

    def distrust(self, values: set[int]) -> None:
        """Have values leave by copy in this step, and those that are made from them, as far as they are still there.

        Args:
            values: Those that the program has the address of, so that they may change and nothing tells.
        """
        with self.lock:
            self.leaving.tainted |= values
            for slot, call in sorted(self.calls.items()):
                self.taint(slot, call)
            for value in self.leaving.tainted & self.records.keys():
                record = self.records[value]
                there = record.in_program()
                if there is not None:
                    self.leaving.distrust(record, there)

    def taint(self, slot: int, call: RecordedCall) -> None:
        """Distrust what an op makes, if it reads what is distrusted."""
        tainted = self.leaving.tainted
        if tainted and any(read.value in tainted for read in find_made(call)):
            tainted.update(self.table.expected[slot - self.table.first_slot].writes)

    def is_at_its_end(self, value: int) -> bool:
        """Whether the handle that is being read is the last one on a value, and no replay will read it."""
        with self.lock:
            record = self.records.get(value)
            if value in self.held or value in self._to_drop:
                return False
            return record is None or (record.handles <= 1 and record.ticket is None)

    def _handle_ended(self, record: Record) -> None:
        """Release the value with autograd's last handle, unless a later replay reads it."""
        record.handles -= 1
        if record.handles == 0 and record.value not in self._to_drop:
            self._let_go(record)

    def ensure(self, record: Record) -> torch.UntypedStorage:
        """Return a value's storage on the device, whatever the schedule has done so far."""
        if self.emptied.away and self.emptied.is_away(record):
            self.emptied.bring_back(record)
            record.storage = record.home()
        held = self._held_by_program(record)
        if record.storage is not None or held is not None:
            self._wait(record)
            record.storage = record.storage if held is None else held
            assert record.storage is not None
            return record.storage
        self.stats.late_swaps += 1
        if record.copied_out:
            self._start_copy_in(record)
            self._wait(record)
        else:
            try:
                record.storage = self._make_again(record.value)
            except (ReplayDiffers, PlanMismatch) as error:
                if not self._recover([record], is_different=isinstance(error, ReplayDiffers)):
                    raise
        assert record.storage is not None
        return record.storage

    def _do(self, action: Action) -> None:
        match action.kind:
            case "replay":
                self._replay(action)
            case "drop":
                self._drop(action)
            case "copy_out":
                self._copy_out(self.records[action.target])
            case "free":
                self._free(self.records[action.target])
            case "empty":
                self._empty(self.records[action.target])
            case "refill":
                self.emptied.refill(self.records[action.target])
            case "copy_in":
                self._copy_in(self.records[action.target])
            case "wait":
                self._wait(self.records[action.target])
            case unknown:
                assert_never(unknown)

    def _copy_out(self, record: Record) -> None:
        if record.storage is None:
            record.storage = record.home()  # released by autograd, but the program may have it saved again
        if record.storage is None:
            return  # released by the program before autograd saved it
        record.size_bytes = record.storage.nbytes()
        if record.size_bytes > self.table.room_bytes[record.value]:
            raise PlanMismatch(
                f"value {record.value} has {record.size_bytes} bytes, but the plan has room for "
                f"{self.table.room_bytes[record.value]} of them in the tier: profile and plan this step again"
            )
        self.leaving.copied(record, record.storage)
        record.ticket = self.arena.copy_out(record.storage, self.table.offsets[record.value])
        self.stats.swapped_out_bytes += record.size_bytes

    def _free(self, record: Record) -> None:
        self._end_copy_out(record)
        if not record.copied_out or record.ticket is not None or record.is_pinned:
            return
        if record.witness is None or record.storage is None:
            record.storage = None
        else:
            self._held_back[record.value] = record
            self._settle_copied(everything=False)

    def _copy_again_if_changed(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Look once more at a swapped value before its bytes are freed, if it may have changed since it was copied."""
        self._held_back.pop(record.value, None)
        if record.witness is not None and record.place is None and self.leaving.has_changed(record, storage):
            record.copied_out = False
            record.ticket = self.arena.copy_out(storage, self.table.offsets[record.value])
            self._end_copy_out(record)

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
        for record in list(self._held_back.values()):
            storage = record.storage
            if storage is None or (not everything and self._is_in_use(storage)):
                continue
            self._copy_again_if_changed(record, storage)
            if record.copied_out and not record.is_pinned:
                record.storage = None

    def _empty(self, record: Record) -> None:
        self._end_copy_out(record)
        if record.copied_out or record.value in self.table.recomputed:
            self._wait(record)
            home = record.home()
            if record.witness is None and home is not None and record.value in self.table.recomputed:
                self.leaving.saved(record, home)
            self.leaving.leave(record)
            if home is not None and record.copied_out:
                self._copy_again_if_changed(record, home)
            self.emptied.empty(record)

    def _end_copy_out(self, record: Record) -> None:
        """Wait for a pending copy out. If the copy failed, the value stays on the device."""
        if record.ticket is None or record.copied_out:
            return
        self.stats.host_stall_ms += record.ticket.wait()
        if record.ticket.error is None:
            record.copied_out = True
        else:
            self.stats.kept_after_errors += 1
            self.stats.kept_bytes += record.size_bytes
            self._health.failed(record.ticket.error)
        record.ticket = None

    def _copy_in(self, record: Record) -> None:
        if record.storage is None and record.copied_out and self._is_wanted(record):
            self._start_copy_in(record)

    def _start_copy_in(self, record: Record) -> None:
        storage = new_storage(record.size_bytes, self.device)
        ticket = _copy_in(self.arena, self.table.offsets, record, storage)
        record.storage, record.ticket = (
            storage,
            ticket,
        )  # no interrupt between them: it would be read too early
        self.stats.swapped_in_bytes += record.size_bytes

    def _is_wanted(self, record: Record) -> bool:
        return record.handles > 0 or record.value in self._to_drop

    def _wait(self, record: Record) -> None:
        if record.ticket is None or not record.copied_out:
            return  # no copy in is pending
        self.stats.host_stall_ms += record.ticket.wait()
        if record.ticket.error is not None:
            fault = self._health.failed(record.ticket.error, is_told=False)
            text = f"a swapped activation cannot be read back: {fault}; repeat the step"
            raise TierError(text, fault.kind) from record.ticket.error
        record.ticket = None
        if self.emptied.away:
            self.emptied.arrived(record)

    def _drop(self, action: Action) -> None:
        """End the schedule's hold on a value, unless slots run out of order and an earlier replay is still to come."""
        value, table = action.target, self.table
        may_be_read = value in table.sources or value in table.swapped or value in table.recomputed
        if may_be_read and any(slot < action.slot for slot in self._replays_ahead):
            return
        self.held.pop(value, None)
        self._to_drop.discard(value)
        record = self.records.get(value)
        if record is not None and record.handles == 0:
            self._let_go(record)

    def _let_go(self, record: Record) -> None:
        """Release the storage once no copy reads or fills it."""
        self._end_copy_out(record)  # so that the tier has it if the program has it saved again
        self.leaving.end(record)
        self._held_back.pop(record.value, None)
        if record.ticket is not None:
            record.ticket.wait()
            record.ticket = None
        record.storage = None

    def _replay(self, action: Action) -> None:
        call = self.calls.get(action.target)
        if call is None:
            return  # the forward pass left the path before this op ran
        records = [self.records.get(value) for value in action.outputs]
        if records and all(record is not None and self.leaving.is_banned(record) for record in records):
            for record in records:
                assert record is not None
                self._copy_in(record)
            return
        try:
            storages = replay_call(call, lambda value, written: self._resolve(value, written, action.in_place))
        except (ReplayDiffers, PlanMismatch) as error:
            if not self._recover(records, is_different=isinstance(error, ReplayDiffers)):
                if isinstance(error, ReplayDiffers):
                    self.leaving.ban(record for record in records if record is not None)
                raise
            return
        self.stats.recomputed_ops += 1
        expected = self.table.expected[action.target - self.table.first_slot]
        for value, storage in zip(expected.writes, storages, strict=True):
            if value in action.outputs:
                self._put(value, storage)

    def _put(self, value: int, storage: torch.UntypedStorage) -> None:
        record = self.records.get(value)
        if record is None:
            self.held[value] = storage
        elif self._is_wanted(record) and record.storage is None and not self.leaving.is_banned(record):
            held = self._held_by_program(record)
            if held is None:
                self.leaving.check(record, storage)
            record.storage = storage if held is None else held

    def _held_by_program(self, record: Record) -> torch.UntypedStorage | None:
        """The storage that autograd has saved, if the program still holds it: plain training reads what is there."""
        found = record.in_program()
        return found if found is not None and found.nbytes() > 0 else None

    def _recover(self, records: list[Record | None], *, is_different: bool) -> bool:
        """Take the copies of values that cannot be replayed, and return whether the step can go on.

        It cannot if there is no copy of one that is wanted. What else the op has made is read by further replays alone,
        which will fail too, and each take its copy.

        Args:
            records: The values.
            is_different: Whether their replays would give something else, rather than nothing at this time.
        """
        wanted = [record for record in records if record is not None and self._is_wanted(record)]
        if not all(map(self.leaving.has_copy, wanted)) or not (wanted or self.leaving.has_copies):
            return False
        for record in wanted:
            record.storage = new_storage(record.size_bytes, self.device)
            self.leaving.recover(record, record.storage, is_different=is_different)
        return True

    def _resolve(self, value: int, written: bool, in_place: tuple[int, ...]) -> torch.UntypedStorage:
        """Return the storage of a value for a replay.

        An op that writes into a value gets a copy, unless the schedule says that the old contents are not needed: a
        step with the same ops may write over a different value than the profiled one did.
        """
        if written and value in in_place and value in self.held:
            return self.held.pop(value)
        storage, record = self.held.get(value), self.records.get(value)
        if storage is not None and self.emptied.away and record is not None:
            self.emptied.bring_back(record)
        if storage is None:
            if record is None:
                raise _lost(value)
            storage = self.ensure(record)
        return copied_storage(storage) if written else storage

    def let_go(self, missing_bytes: int) -> int:
        """Free planned values ahead of the schedule, oldest first, and return how many bytes that frees.

        Only values that can come back go: those that the tier holds or has room for. None go while another thread works
        on the step, which may itself be waiting for the room that is made here.
        """
        freed_bytes = 0
        with self.lock.if_free() as is_free:
            for record in self.records.values() if is_free else ():
                if freed_bytes >= missing_bytes:
                    break
                storage = record.storage
                if storage is None or not record.handles or record.changed or self._is_in_use(storage):
                    continue
                if record.copied_out:
                    self._wait(record)
                elif record.value in self.table.swapped:
                    if record.ticket is None:
                        self._copy_out(record)
                    self._end_copy_out(record)
                if record.copied_out:
                    record.storage = None
                    freed_bytes += record.size_bytes
        return freed_bytes

    def _is_in_use(self, storage: torch.UntypedStorage) -> bool:
        return torch._C._storage_Use_Count(storage._cdata) > 1

    # Outside of the schedule ------------------------------------------------------------------------------------------

    def _make_again(self, value: int) -> torch.UntypedStorage:
        """Replay what a value depends on, sources first. Iterative, since a chain of replays may be long."""
        made: dict[int, torch.UntypedStorage] = {}
        stack = [value]
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
        return made[value]

    def _at_hand(self, value: int, made: dict[int, torch.UntypedStorage]) -> bool:
        record = self.records.get(value)
        here = record is not None and (record.storage is not None or record.copied_out)
        return here or value in made or value in self.held

    def _replay_outside(self, value: int, made: dict[int, torch.UntypedStorage]) -> None:
        slot = self.table.producer_of[value]

        def resolve(read: int, written: bool) -> torch.UntypedStorage:
            storage = made.get(read)
            if storage is None:
                return self._resolve(read, written, ())
            return copied_storage(storage) if written else storage

        storages = replay_call(self.calls[slot], resolve)
        self.stats.recomputed_ops += 1
        for each, storage in zip(self.table.expected[slot - self.table.first_slot].writes, storages, strict=True):
            record = self.records.get(each)
            if record is not None and record.value in self.table.recomputed:
                self.leaving.check(record, storage)
            made[each] = storage


def _copy_in(arena: Arena, offsets: dict[int, int], record: Record, storage: torch.UntypedStorage) -> Ticket:
    """Start filling a storage from where the tier has the value."""
    if record.place is not None:
        return record.place.copy_in(storage)
    return arena.copy_in(storage, offsets[record.value])


def _lost(value: int) -> PlanMismatch:
    return PlanMismatch(
        f"the backward pass needs value {value} again, but the plan neither holds it nor replays the op that produces "
        "it: profile and plan this step again"
    )
