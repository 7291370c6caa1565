"""One step under a plan: the dispatch mode of its forward pass, and the hooks through which autograd saves and
reads.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pooch.errors import PlanMismatch, TierError
from pooch.executor.emptied import EmptiedStorages
from pooch.executor.engines.protocol import Arena
from pooch.executor.records import PackedRecord, Record, changed_in_place, pack_kept
from pooch.executor.replay import RecordedCall, find_made, record_call, replay_call
from pooch.executor.statistics import RunStats
from pooch.executor.table import ActionTable
from pooch.ir import Action, ExpectedOp
from pooch.torchtools.effects import StorageMap
from pooch.torchtools.tensors import fingerprint, has_plain_storage


class PlannedStep:
    """State of one step, from its forward pass to the end of its backward pass.

    Lives as long as autograd holds one of its handles, so several forward passes before one backward pass each have
    their own.
    """

    def __init__(
        self, table: ActionTable, arena: Arena, device: torch.device, stats: RunStats, on_mismatch: str, told: set[str]
    ) -> None:
        self.table, self.arena, self.device, self.stats = table, arena, device, stats
        self.on_mismatch, self._told = on_mismatch, told
        self.values = StorageMap()
        self.records = {value: Record(value) for value in table.swapped | table.recomputed}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.calls: dict[int, RecordedCall] = {}
        self.to_drop = set(table.dropped)
        make_again = weakref.WeakMethod(self._make_again)  # a step that holds itself would wait for the collector
        self.emptied = EmptiedStorages(arena, table.offsets, stats, make_again)
        self.on_path = True
        self.begin = time.perf_counter()
        self._next = 0
        self.is_own = False  # whatever is done just now is not the program's doing
        self._acted: set[int] = set()
        self._replays_ahead = set(table.replay_slots)
        weakref.finalize(self, arena.close).atexit = False

    # The forward pass -------------------------------------------------------------------------------------------

    def before_op(self, func: Any, facts: Any, args: Any, kwargs: Any, written: dict[int, torch.Tensor]) -> None:
        """Actions due before the next op, and what has to be remembered of its call."""
        in_order = self.arena.in_order()
        if self.on_path and not in_order:
            self._leave_path("an op on the stream that the region began on", f"{facts.name} on another stream")
        if self.on_path:
            slot = self.table.first_slot + self._next
            if slot in self.table.actions and self._is_due(facts.name):
                self.act(slot)
            if slot in self.table.replayed:
                self.calls[slot] = record_call(func, facts, args, kwargs, self.values, self.device)
        if self.emptied.away:
            self.emptied.look((args, kwargs))
        for key in written:
            self._protect(self.values.get(key))

    def _is_due(self, name: str) -> bool:
        """Whether the op that comes may be the next planned one; else it makes nothing, such as `.item()`, or leaves
        the path.
        """
        return self._next < len(self.table.expected) and self.table.expected[self._next].name == name

    def _protect(self, value: int | None) -> None:
        """An op is about to write over a value: let a copy of it end first, and remember that it changed."""
        record = self.records.get(value) if value is not None else None
        if record is not None:
            record.changed = record.handles > 0
            if record.ticket is not None:
                self.stats.stall_ms += record.ticket.wait()

    def after_op(self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]) -> None:
        """Recognise the op that ran and take hold of what the plan needs of its results."""
        expected = self._recognise(func, name, outputs, made) if self.on_path else None
        if expected is None:
            for tensor in made:
                self.values.bind(tensor.untyped_storage(), -1)
            return
        self._next += 1
        for value, tensor in zip(expected.writes, made, strict=True):
            storage = tensor.untyped_storage()
            self.values.bind(storage, value)
            if value in self.table.sources:
                self.held[value] = storage
            elif value in self.table.swapped:
                self.records[value].storage = storage
            if value in self.table.emptied:
                self.records[value].home = weakref.ref(storage)

    def look(self, arguments: Any, handed_out: bool = False) -> None:
        """The program is about to look at tensors without an op that computes."""
        if self.on_path and not self.is_own:
            self.is_own = True
            try:
                with torch._C._DisableTorchDispatch():
                    self.emptied.look(arguments)
                    if handed_out:
                        self.emptied.hand_out(arguments, self.values, self.records)
            finally:
                self.is_own = False

    def quietly(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The hook, what it does being no look of the program's."""

        def quiet(argument: Any) -> Any:
            before, self.is_own = self.is_own, True
            try:
                return hook(argument)
            finally:
                self.is_own = before

        return quiet

    def _recognise(
        self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]
    ) -> ExpectedOp | None:
        """The planned op that this one is; None, and off the path, where it is another one."""
        if self._next >= len(self.table.expected):
            self._leave_path("the end of the region", fingerprint(name, outputs))
            return None
        expected = self.table.expected[self._next]
        is_expected = self.table.recogniser.is_expected(self._next, func, name, outputs)
        if not is_expected or len(made) != len(expected.writes):
            self._leave_path(expected.fingerprint, fingerprint(name, outputs))
            return None
        return expected

    def end_forward(self) -> None:
        """The region is over. What is due next waits for the first read of the backward pass, which may come late."""
        if self.on_path and self._next < len(self.table.expected):
            self._leave_path(self.table.expected[self._next].fingerprint, "the end of the region")

    def restore(self) -> None:
        """Nobody watches from here on: what the program holds is there again."""
        if self.emptied.away:
            before, self.is_own = self.is_own, True
            try:
                with torch._C._DisableTorchDispatch():
                    self.emptied.restore()
            finally:
                self.is_own = before

    def _leave_path(self, expected: str, actual: str) -> None:
        self.on_path = False
        self.stats.mismatches = 1
        self.restore()
        text = (
            f"the step left the planned path at op {self._next}: expected {expected}, got {actual}; the rest of this "
            f"step "
            "keeps its activations (profile and plan again to follow the new path)"
        )
        if self.on_mismatch == "error":
            raise PlanMismatch(text)
        self._tell_once("path", text)

    def _tell_once(self, topic: str, text: str) -> None:
        """Warn, the first time under this run; later steps count it in their stats alone."""
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(text, stacklevel=2)

    # Actions ----------------------------------------------------------------------------------------------------

    def act(self, slot: int) -> None:
        """Do what the schedule says at the entry of a slot, once."""
        if slot in self._acted or not self.on_path:
            return
        self._acted.add(slot)
        self._replays_ahead.discard(slot)
        for action in self.table.actions.get(slot, ()):
            self._do(action)

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
            return  # the program let go of it before anybody saved it
        record.size_bytes = record.storage.nbytes()
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
        self.stats.stall_ms += record.ticket.wait()
        if record.ticket.error is None:
            record.copied_out = True
        else:
            self._warn_kept(record.ticket.error)
        record.ticket = None

    def _warn_kept(self, error: BaseException) -> None:
        self.stats.kept_after_errors += 1
        self._tell_once(
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
        return record.handles > 0 or record.value in self.to_drop

    def _wait(self, record: Record) -> None:
        if record.ticket is None or not record.copied_out:
            return  # nothing is on its way back
        self.stats.stall_ms += record.ticket.wait()
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
        self.to_drop.discard(value)
        record = self.records.get(value)
        if record is not None and record.handles == 0:
            self._let_go(record)

    def _let_go(self, record: Record) -> None:
        """Give up the device bytes, once no copy reads or fills them any more."""
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
        """The storage of a made value for a replay: a fresh copy where the op writes into a value that is still
        needed.
        """
        if written and value in in_place:
            return self.held.pop(value)
        storage = self.held.get(value)
        if storage is not None and self.emptied.away and value in self.records:
            self.emptied.bring_back(self.records[value])
        if storage is None:
            record = self.records[value]
            self._ensure(record)
            assert record.storage is not None
            storage = record.storage
        return storage.clone() if written else storage

    # Saving and reading -----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """What autograd gets to hold for a tensor that it saves."""
        # Every saved tensor passes here and through `unpack`: see `python -m benchmarks.hook_cost`.
        if not has_plain_storage(tensor):
            return tensor
        value = self.values.get(tensor.untyped_storage()._cdata)
        record = self.records.get(value) if value is not None else None
        if record is None:
            return pack_kept(tensor, value)
        if record.storage is None and record.value in self.table.swapped and not record.copied_out:
            record.storage = tensor.untyped_storage()  # saved again after an earlier save was let go of
        with torch._C._DisableTorchDispatch():  # what we do is no op of the step
            return PackedRecord(self, record, tensor, self._released)

    def unpack(self, packed: object) -> torch.Tensor:
        """The tensor that autograd reads, after the actions tied to its first read."""
        self.stats.step_ms = (time.perf_counter() - self.begin) * 1000
        if type(packed) is tuple:
            tensor, version, value = packed
            if value in self.table.anchor_of:
                self._before_read(value)
            if tensor._version != version:
                raise changed_in_place(f"{tensor.type()} {list(tensor.shape)}")
            return tensor  # type: ignore[no-any-return]
        if isinstance(packed, PackedRecord):
            self._before_read(packed.record.value)
            packed.check()
            with torch._C._DisableTorchDispatch():
                self._ensure(packed.record)
                assert packed.record.storage is not None
                return packed.geometry.on(packed.record.storage)
        assert isinstance(packed, torch.Tensor)
        return packed

    def _before_read(self, value: int) -> None:
        slot = self.table.anchor_of.get(value)
        if slot is not None and slot not in self._acted:
            with torch._C._DisableTorchDispatch():
                self.act(slot)
            self.stats.step_ms = (time.perf_counter() - self.begin) * 1000

    def _released(self, record: Record) -> None:
        """Autograd let go of a value: so do we, unless a later replay reads it."""
        if record.value not in self.to_drop:
            self._let_go(record)

    # Outside of the schedule ------------------------------------------------------------------------------------

    def _ensure(self, record: Record) -> None:
        """Have a value on the device, whatever the schedule has or has not done."""
        if self.emptied.away and self.emptied.is_away(record):
            self.emptied.bring_back(record)
            record.storage = record.home()
        if record.storage is not None:
            self._wait(record)
            return
        self.stats.late_swaps += 1
        if record.copied_out:
            self._start_copy_in(record)
            self._wait(record)
        else:
            record.storage = self._make_again(record.value)

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
        call = self.calls[self.table.producer_of[value]]
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
