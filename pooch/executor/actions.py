"""The actions of one step's schedule, and what they act on: which values are on the device, where the others are."""

from __future__ import annotations

import weakref

import torch

from pooch.errors import PlanMismatch, TierError
from pooch.executor.emptied import EmptiedStorages
from pooch.executor.engines.protocol import Arena
from pooch.executor.lock import StepLock
from pooch.executor.records import PackedRecord, Record
from pooch.executor.replay import RecordedCall, find_made, replay_call
from pooch.executor.statistics import RunStats
from pooch.executor.table import ActionTable
from pooch.executor.warn_once import WarnOnce
from pooch.ir import Action


class StepActions:
    """Carries out actions, each slot's once, and has any value on the device when it is asked for.

    Args:
        table: of the plan. arena: the swap tier. device: where values are needed. stats: counts.
        warn_once: for copies that fail, and for the path when it is left. All five are attributes too.

    Attributes:
        records: {value: where it is} of everything that is swapped or recomputed.
        held: {value: storage} of what replays will read.
        calls: {slot: call} of ops that may be replayed.
        emptied: what is away while the program holds it.
        lock: held while any of this changes, but for what the forward pass alone adds to.
    """

    def __init__(
        self,
        table: ActionTable,
        arena: Arena,
        device: torch.device,
        stats: RunStats,
        warn_once: WarnOnce,
    ) -> None:
        self.table, self.arena, self.device, self.stats = table, arena, device, stats
        self.warn_once = warn_once
        self.lock = StepLock(self._handle_ended)
        self.records = {value: Record(value) for value in table.swapped | table.recomputed}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.calls: dict[int, RecordedCall] = {}
        self._to_drop = set(table.dropped)
        self._acted: set[int] = set()
        self._done: set[int] = set()
        self._replays_ahead = set(table.replay_slots)
        make_again = weakref.WeakMethod(self._make_again)  # a step that holds itself would wait for the collector
        self.emptied = EmptiedStorages(arena, table.offsets, stats, make_again)
        weakref.finalize(self, arena.close).atexit = False

    def is_due(self, slot: int) -> bool:
        """Whether the slot's actions are not done yet; another thread may be at work on them."""
        return slot not in self._done

    def act(self, slot: int) -> None:
        """Do what the schedule says at the entry of a slot, once; whoever comes second waits until it is done."""
        with self.lock:
            if slot in self._acted:
                return
            self._acted.add(slot)
            self._replays_ahead.discard(slot)
            for action in self.table.actions.get(slot, ()):
                self._do(action)
            self._done.add(slot)

    def protect(self, value: int | None) -> None:
        """An op is about to write over a value: let a copy of it end first, and remember that it changed.

        What a replay would read from here on is another value, so nothing holds this one any more.
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
            if not record.handles:
                self._end_copy_out(record)
                self._let_go(record)

    def made(self, value: int, storage: torch.UntypedStorage) -> None:
        """An op of the forward pass has made a value: take hold of what the plan needs of it."""
        if value in self.table.sources:
            self.held[value] = storage
        elif value in self.table.swapped:
            self.records[value].storage = storage
        if value in self.table.emptied:
            self.records[value].home = weakref.ref(storage)

    def hold(self, step: object, record: Record, tensor: torch.Tensor) -> PackedRecord:
        """A handle for a tensor that autograd saves on a planned value, maybe after it let go of an earlier one.

        The tier may hold the value from a gap of the forward pass, in a room that another one has since; so what counts
        is that its bytes are here.
        """
        with self.lock:
            here = not record.copied_out or record.value in self.table.emptied
            if record.storage is None and record.value in self.table.swapped and here:
                record.storage = tensor.untyped_storage()
            return PackedRecord(step, record, tensor, self.lock.end)

    def _handle_ended(self, record: Record) -> None:
        """Autograd let go of a handle. With the last one, so do we of the value, unless a later replay reads it."""
        record.handles -= 1
        if record.handles == 0 and record.value not in self._to_drop:
            self._let_go(record)

    def ensure(self, record: Record) -> torch.UntypedStorage:
        """Have a value on the device, whatever the schedule has or has not done."""
        if self.emptied.away and self.emptied.is_away(record):
            self.emptied.bring_back(record)
            record.storage = record.home()
        if record.storage is not None:
            self._wait(record)
            return record.storage
        self.stats.late_swaps += 1
        if record.copied_out:
            self._start_copy_in(record)
            self._wait(record)
        else:
            record.storage = self._make_again(record.value)
        assert record.storage is not None
        return record.storage

    def _do(self, action: Action) -> None:
        if action.kind == "replay":
            self._replay(action)
        elif action.kind == "drop":
            self._drop(action)
        else:
            record = self.records[action.target]
            {
                "copy_out": self._copy_out,
                "free": self._free,
                "empty": self._empty,
                "refill": self.emptied.refill,
                "copy_in": self._copy_in,
                "wait": self._wait,
            }[action.kind](record)

    def _copy_out(self, record: Record) -> None:
        if record.storage is None:
            record.storage = record.home()  # autograd let go, the program did not, and may have it saved again
        if record.storage is None:
            return  # the program let go of it before anybody saved it
        record.size_bytes = record.storage.nbytes()
        if record.size_bytes > self.table.room_bytes[record.value]:
            raise PlanMismatch(
                f"value {record.value} has {record.size_bytes} bytes, and the plan has room for "
                f"{self.table.room_bytes[record.value]} of them in the tier: profile and plan this step again"
            )
        record.ticket = self.arena.copy_out(record.storage, self.table.offsets[record.value])
        self.stats.swapped_out_bytes += record.size_bytes

    def _free(self, record: Record) -> None:
        self._end_copy_out(record)
        if record.copied_out and record.ticket is None:
            record.storage = None

    def _empty(self, record: Record) -> None:
        self._end_copy_out(record)
        if record.copied_out or record.value in self.table.recomputed:
            self._wait(record)
            self.emptied.empty(record)

    def _end_copy_out(self, record: Record) -> None:
        """Wait for the copy out, if it is under way; where it failed, the value stays."""
        if record.ticket is None or record.copied_out:
            return
        self.stats.host_stall_ms += record.ticket.wait()
        if record.ticket.error is None:
            record.copied_out = True
        else:
            self._warn_kept(record.ticket.error)
        record.ticket = None

    def _warn_kept(self, error: BaseException) -> None:
        self.stats.kept_after_errors += 1
        self.warn_once(
            "copy",
            f"swapping out failed ({error}); the tensor stays on the device, so the peak may pass the budget: "
            "free room in the tier or choose another with spill_directory=",
        )

    def _copy_in(self, record: Record) -> None:
        if record.storage is None and record.copied_out and self._is_wanted(record):
            self._start_copy_in(record)

    def _start_copy_in(self, record: Record) -> None:
        record.storage = torch.UntypedStorage(record.size_bytes, device=self.device)
        record.ticket = self.arena.copy_in(record.storage, self.table.offsets[record.value])
        self.stats.swapped_in_bytes += record.size_bytes

    def _is_wanted(self, record: Record) -> bool:
        return record.handles > 0 or record.value in self._to_drop

    def _wait(self, record: Record) -> None:
        if record.ticket is None or not record.copied_out:
            return  # nothing is on its way back
        self.stats.host_stall_ms += record.ticket.wait()
        if record.ticket.error is not None:
            raise TierError(
                f"a swapped activation cannot be read back ({record.ticket.error}): repeat the step, with another tier "
                "(spill_directory= or POOCH_SPILL_DIRECTORY) if it happens again"
            ) from record.ticket.error
        record.ticket = None
        if self.emptied.away:
            self.emptied.arrived(record)

    def _drop(self, action: Action) -> None:
        """End the schedule's hold, unless, in another order, an earlier replay is still to come."""
        value = action.target
        if value in self.table.held_values and any(slot < action.slot for slot in self._replays_ahead):
            return
        self.held.pop(value, None)
        self._to_drop.discard(value)
        record = self.records.get(value)
        if record is not None and record.handles == 0:
            self._let_go(record)

    def _let_go(self, record: Record) -> None:
        """Give up the device bytes, once no copy reads or fills them any more."""
        self._end_copy_out(record)  # the tier has it then, should the program have it saved again
        if record.ticket is not None:
            record.ticket.wait()
            record.ticket = None
        record.storage = None

    def _replay(self, action: Action) -> None:
        call = self.calls.get(action.target)
        if call is None:
            return  # the forward pass left the path before this op
        storages = replay_call(call, lambda value, written: self._resolve(value, written, action.in_place))
        self.stats.recomputed_ops += 1
        expected = self.table.expected[action.target - self.table.first_slot]
        for value, storage in zip(expected.writes, storages, strict=True):
            if value in action.outputs:
                self._put(value, storage)

    def _put(self, value: int, storage: torch.UntypedStorage) -> None:
        record = self.records.get(value)
        if record is None:
            self.held[value] = storage
        elif self._is_wanted(record):
            record.storage = storage

    def _resolve(self, value: int, written: bool, in_place: tuple[int, ...]) -> torch.UntypedStorage:
        """The storage of a made value for a replay: a fresh copy where the op writes into a value that may still be
        needed, since a step with the same ops may write over another value than the one that was profiled.
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
        return storage.clone() if written else storage

    # Outside of the schedule ------------------------------------------------------------------------------------------

    def _make_again(self, value: int) -> torch.UntypedStorage:
        """Replay what a value needs, sources first; iterative, since a chain of replays may be long."""
        made: dict[int, torch.UntypedStorage] = {}
        stack = [value]
        while stack:
            missing = [read for read in self._reads_of(stack[-1]) if not self._at_hand(read, made)]
            if missing:
                stack.extend(missing)
                continue
            current = stack.pop()
            if not self._at_hand(current, made):
                self._replay_outside(current, made)
        return made[value]

    def _reads_of(self, value: int) -> list[int]:
        call = self.calls.get(self.table.producer_of[value])
        if call is None:
            raise _lost(value)
        return [a.value for a in find_made(call)]

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
            return storage.clone() if written else storage

        storages = replay_call(self.calls[slot], resolve)
        self.stats.recomputed_ops += 1
        made.update(zip(self.table.expected[slot - self.table.first_slot].writes, storages, strict=True))


def _lost(value: int) -> PlanMismatch:
    return PlanMismatch(
        f"the backward pass needs value {value} again, and the plan neither holds it nor replays the op that makes it: "
        "profile and plan this step again"
    )
