"""The state of one step under a plan, as the dispatch mode and the saved tensor hooks drive it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PlanMismatch
from ..ir import ExpectedOp
from ..torchtools.effects import StorageMap, changed_statistics, written_tensors
from ..torchtools.operators import call_refusal
from ..torchtools.recurrent_dropout import InitialisationWatch
from ..torchtools.tensors import (
    find_tensors,
    fingerprint,
    has_plain_storage,
    may_move,
    storage_key,
    storage_of,
    tensors_with_memory,
)
from .actions import StepActions
from .online import OnlineStep
from .records import Handle, KeptTensor, OnlineHandle, Reassigned, changed_in_place, pack_kept
from .replay import OuterArgument, outer_arguments, preserve, record_call
from .silence import SavedTensors, Silence
from .statistics import RunStats

_AGAIN = "profile and plan again to follow the new path"


class _OwnWork(threading.local):
    """Marks what the current thread does as Pooch's own work rather than the program's: `with OWN_WORK: ...`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1

    def is_over(self) -> None:
        """Note that the thread does none, as a step begins. Ctrl-C may have kept `__exit__` from running."""
        self.depth = 0


OWN_WORK = _OwnWork()


class PlannedStep(SavedTensors):
    """The state of one step, from its forward pass to the end of its backward pass.

    It lives as long as autograd holds one of its handles, so each of several forward passes before one backward pass
    has its own.

    Args:
        actions: Runs the actions of the schedule.
        on_mismatch: "warn", "error" or "follow", for a step that leaves the path. "follow" says nothing.
        online: Holds what the plan keeps, so that it can leave if the step takes more than planned, and takes over
            where the step leaves the path. None keeps it.

    Attributes:
        mismatches: Why the schedule could not be carried out, where `online` has taken over for that.
    """

    def __init__(self, actions: StepActions, on_mismatch: str, online: OnlineStep | None = None) -> None:
        self.actions, self.on_mismatch, self.online = actions, on_mismatch, online
        self.table, self.arena, self.device, self.stats = actions.table, actions.arena, actions.device, actions.stats
        self.values = StorageMap() if online is None else online.values
        self.planned, self.emptied = actions.planned, actions.emptied
        self.silence = actions.silence if online is None else online.evictor.silence
        self.on_path = True
        self.mismatches: list[str] = []
        self.begin = time.perf_counter()
        self._next = 0
        self._initialisation = InitialisationWatch()
        self.op = threading.Lock()  # held from before an op until its results are known
        self._kept: list[weakref.ref[KeptTensor]] = []
        self._outer_readers: dict[int, list[OuterArgument]] = {}  # by the storage of a tensor from outside of the step
        if online is not None:
            online.evictor.keeps(self)
        self.reassigned = Reassigned() if online is None else online.reassigned
        self.on_read: Callable[[], None] | None = None  # called once, at the first read of a saved tensor

    # The forward pass -------------------------------------------------------------------------------------------

    def begin_op(self) -> bool:
        """Whether the op that begins is the only one running.

        Two ops that overlap cannot be told apart, so the plan ends there.
        """
        if self.op.acquire(blocking=False):
            return True
        if self.on_path:
            self._leave_path("one op at a time", "an op that overlaps with one in another thread")
        return False

    def before_op(self, func: Any, facts: Any, args: Any, kwargs: Any, written: dict[int, torch.Tensor]) -> None:
        """Run the actions that are due before the next op, and record its call if it may be replayed."""
        if self.on_path:
            slot, expected = self.table.first_slot + self._next, self.table.expected
            # Actions wait for the planned op: another one produces nothing (`.item()`) or leaves the path.
            if slot in self.table.actions and self._next < len(expected) and expected[self._next].name == facts.name:
                self._act(slot)
            if slot in self.table.replayed and self.on_path:
                self._remember(slot, func, facts, args, kwargs)
        if self.emptied.away:
            self.bring_back((args, kwargs))
        if self.actions.waits_for_program:
            with self.actions.lock:
                self.actions.settle()
        if self._outer_readers:
            self._preserve(func, facts, args, written)
        for key, tensor in written.items():
            self.actions.protect(self.values.get(key), storage_of(tensor))
        if self.online is not None:
            if self.on_path:
                self.online.evictor.look(0)
                for key in written:
                    self.online.overwritten(self.values.get(key))
            else:
                self.online.before_op(func, facts, args, kwargs, written)

    def _act(self, slot: int) -> None:
        """Run the actions of a slot. Where they cannot be run, the step goes on without them if anything takes over."""
        try:
            self.actions.act(slot)
        except PlanMismatch as error:
            if self.online is None or self.on_mismatch == "error":
                raise
            self.mismatches.append(str(error))
            self._leave_path("a step that the schedule is made for", str(error))

    def beside(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op that is about to run on another stream of the program, as FSDP's collectives and prefetchers do.

        It is not part of the plan, and is left alone unless it works on a planned value.
        """
        tensors = [tensor for tensor in find_tensors((args, kwargs)) if has_plain_storage(tensor)]
        planned = [storage_of(tensor) for tensor in tensors if self._is_planned(tensor)]
        if planned and self.on_path:
            actual = f"{facts.name} on another stream, which works on a value of the plan"
            self._leave_path("an op on the stream that the region began on", actual)
        if self.emptied.away:
            self.bring_back((args, kwargs))
        if planned:
            with self.actions.lock:  # last, since only now do emptied storages have memory to tell the allocator of
                self.arena.join(planned)
        self._note_written(facts, args, kwargs)

    def _value_in(self, tensor: torch.Tensor) -> int | None:
        return self.values.get(storage_key(tensor))

    def unseen(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op of a compiled function that is about to run. It is no part of the plan, but it may write."""
        if self.emptied.away:
            self.bring_back((args, kwargs))
        self._note_written(facts, args, kwargs)

    def _note_written(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Note that an op that is no part of the plan is about to write."""
        for key, tensor in written_tensors(facts, args, kwargs).items():
            self.actions.protect(self.values.get(key), storage_of(tensor))
            self.values.bind(storage_of(tensor), -1)

    def _is_planned(self, tensor: torch.Tensor) -> bool:
        value = self._value_in(tensor)
        return value in self.planned or value in self.actions.held

    def bring_back(self, arguments: Any) -> None:
        """Bring back emptied values among arguments that the program is about to read."""
        with self.actions.lock, self.arena.at_home():
            self.emptied.look(arguments)

    def _remember(self, slot: int, func: Any, facts: Any, args: Any, kwargs: Any) -> None:
        """Record a call for a replay, unless its result may vary under PyTorch's current settings."""
        refusal = call_refusal(func, args) if facts.depends_on_call else None
        if torch._C._len_torch_dispatch_stack() > 0:
            return  # a mode of the program's around the step may change what the op gives, and sees no replay
        if refusal is not None:
            self._leave_path(f"{facts.name} as an op that can be replayed", f"{facts.name}, which cannot: {refusal}")
        else:
            call = record_call(func, facts, args, kwargs, self.values, self.device, self.table.gathered)
            self.actions.calls[slot] = call
            self.actions.taint(slot, call)
            for argument in outer_arguments(call):
                # What FSDP gathers again is the same again, and its storage holds anything until then.
                if has_plain_storage(argument.alias) and self._value_in(argument.alias) not in self.table.gathered:
                    self._outer_readers.setdefault(storage_key(argument.alias), []).append(argument)

    def _preserve(self, func: Any, facts: Any, args: Any, written: dict[int, torch.Tensor]) -> None:
        """Copy what an op is about to change and recorded calls have read, such as running statistics."""
        changing = [*written, *map(storage_key, changed_statistics(facts, func, args))]
        for key in changing:
            readers = self._outer_readers.pop(key, None)
            if readers is not None:
                preserve(readers)

    def after_op(self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]) -> None:
        """Match the op that ran against the plan, and register its results."""
        if self.online is not None and not self.on_path:
            self.online.after_op(func, name, outputs, made)
            return
        expected = self._recognise(func, name, outputs, made) if self.on_path else None
        if expected is None:
            for tensor in made:
                self.values.bind(storage_of(tensor), -1)
            return
        self._next += 1
        for value, tensor in zip(expected.writes, made, strict=True):
            storage = storage_of(tensor)
            self.values.bind(storage, value)
            self.actions.made(value, storage)

    def look(self, arguments: Any, handed_out: bool = False) -> None:
        """Bring back emptied values that the program is about to read without an op.

        Args:
            arguments: What it reads, in any nesting.
            handed_out: Whether the program obtains the address of the memory.
        """
        if OWN_WORK.depth:
            return
        if handed_out:
            self._hand_out(arguments)
        if self.on_path and self.emptied.away:
            with OWN_WORK, torch._C._DisableTorchDispatch(), self.actions.lock, self.arena.at_home():
                self.emptied.look(arguments)

    def _hand_out(self, arguments: Any) -> None:
        """Note that the program obtains the address of tensors, so that they may change and nothing tells."""
        with OWN_WORK, torch._C._DisableTorchDispatch():
            self.emptied.hand_out(arguments, self.values, self.planned)
            tensors = [tensor for tensor in tensors_with_memory(arguments)[0] if has_plain_storage(tensor)]
            values = {value for value in map(self._value_in, tensors) if value is not None and value >= 0}
            if values:
                self.actions.distrust(values)
            if self.online is not None and not self.on_path:
                self.online.handed_out(arguments)

    def data_assigned(self, tensor: torch.Tensor) -> None:
        """Note that the program is about to give a tensor other data."""
        if has_plain_storage(tensor):
            self.reassigned.note(tensor, self._value_in(tensor))

    def quietly(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a hook so that what it does does not count as a read by the program."""

        def quiet(argument: Any) -> Any:
            with OWN_WORK:
                return hook(argument)

        return quiet

    def _recognise(
        self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]
    ) -> ExpectedOp | None:
        """Return the planned op that this one is, or None. An unknown op leaves the path."""
        if self._next >= len(self.table.expected):
            self._leave_path("the end of the region", fingerprint(name, outputs))
            return None
        expected = self.table.expected[self._next]
        is_expected = self.table.recogniser.is_expected(self._next, func, name, outputs)
        if not is_expected or len(made) != len(expected.writes):
            if not self._initialisation.takes(name, made):
                self._leave_path(expected.fingerprint, fingerprint(name, outputs))
            return None
        return expected

    def end_forward(self) -> None:
        """End the region. Actions that are due next wait for the first read of the backward pass."""
        if self.on_path and self._next < len(self.table.expected):
            self._leave_path(self.table.expected[self._next].fingerprint, "the end of the region")
        if self.actions.waits_for_program:
            with self.actions.lock, torch._C._DisableTorchDispatch(), self.arena.at_home():
                self.actions.settle_all()

    def restore(self) -> None:
        """Bring everything back that the program holds, since its reads are no longer intercepted."""
        if self.emptied.away:
            with OWN_WORK, torch._C._DisableTorchDispatch(), self.actions.lock, self.arena.at_home():
                self.emptied.restore()

    def _leave_path(self, expected: str, actual: str) -> None:
        self.on_path = False
        self.stats.mismatches = 1
        self.restore()
        self.actions.keep_what_is_held()
        text = f"the step left the planned path at op {self._next}: expected {expected}, got {actual}"
        if self.on_mismatch == "error":
            raise PlanMismatch(f"{text}; {_AGAIN}")
        if self.online is not None:
            with self.online.evictor.lock, torch._C._DisableTorchDispatch():
                self.let_kept_leave()
            self.online.evictor.take_over(self.actions)
        if self.on_mismatch == "follow":
            return
        if self.online is not None and self.online.evictor.is_held:
            rest = "the budget is held without the plan, which takes longer"
        else:
            rest = "the rest of the step keeps its activations and may exceed the budget"
        self.actions.warn_once(("path", _kind(expected), _kind(actual)), f"{text}; {rest} ({_AGAIN})")

    def writing_over(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Return what tells in the backward pass whether neither autograd nor a replay will read the tensor again."""
        value, step = self.values.get(storage_key(tensor)), weakref.ref(self)

        def may_write() -> bool:
            here = step()  # the graph of the loss must not hold the step; without it there are neither
            return value is None or here is None or here.actions.is_at_its_end(value)

        return may_write

    # Saving and reading -----------------------------------------------------------------------------------------

    def silenced(self) -> tuple[Silence, RunStats]:
        """Return what tells what is not governed, and the counters of the step."""
        return self.silence, self.stats

    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        if not may_move(tensor):
            return self.keep_silent(tensor)
        value = self.values.get(storage_of(tensor)._cdata)
        planned = self.planned.get(value) if value is not None else None
        if planned is None:
            if self.online is None or value is None or value < 0:
                return pack_kept(tensor, value)
            if not self.on_path:
                with torch._C._DisableTorchDispatch():
                    return self.online.hold(tensor, value, self)
            detached, version, _, identity = pack_kept(tensor, value)
            kept = KeptTensor(detached, version, value, identity)
            self._kept.append(weakref.ref(kept))
            return kept
        with torch._C._DisableTorchDispatch():  # not ops of the step
            return self.actions.hold(self, planned, tensor, is_planned=self.on_path)

    def unpack_plain(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads, after the actions tied to its first read."""
        self.stats.host_step_ms = (time.perf_counter() - self.begin) * 1000
        if self.on_read is not None:
            self._tell_read()
        if self.reassigned and (other := self.reassigned.instead_of(packed)) is not None:
            return other
        if type(packed) is tuple:
            tensor, version, value, _ = packed
            if value in self.table.anchor_of:
                self._before_read(value)
            if tensor._version != version:
                raise changed_in_place(f"{tensor.type()} {list(tensor.shape)}")
            return tensor  # type: ignore[no-any-return]
        if type(packed) is KeptTensor:
            return self._read_kept(packed)
        if type(packed) is OnlineHandle:
            assert self.online is not None
            if packed.value.number in self.table.anchor_of:
                self._before_read(packed.value.number)
            return self.online.read(packed)
        if isinstance(packed, Handle):
            if self.online is not None:
                self.online.evictor.hold()
            with self.actions.lock:  # wait for what another thread of autograd has begun
                return self._read_beside(packed) if self.arena.is_beside() else self._read(packed)
        assert isinstance(packed, torch.Tensor)
        return packed

    def _read_kept(self, packed: KeptTensor) -> torch.Tensor:
        assert self.online is not None
        self.online.evictor.hold()
        if packed.number in self.table.anchor_of:
            self._before_read(packed.number)
        tensor = packed.tensor  # it may have been given a handle just now
        if tensor is None:
            assert packed.handle is not None
            return self.online.read(packed.handle)
        if tensor._version != packed.version:
            raise changed_in_place(f"{tensor.type()} {list(tensor.shape)}")
        return tensor

    def let_kept_leave(self) -> None:
        """Let what the plan keeps leave as well, unless it was written over. The caller holds the evictor's lock."""
        assert self.online is not None
        kept, self._kept = self._kept, []
        for each in [reference() for reference in kept]:
            if each is None or each.tensor is None or each.tensor._version != each.version:
                continue
            if self.values.get(storage_key(each.tensor)) == each.number:
                each.handle = self.online.hold(each.tensor, each.number, self)
                each.tensor = None

    def _read(self, packed: Handle) -> torch.Tensor:
        self._before_read(packed.value.number)
        packed.check()
        with torch._C._DisableTorchDispatch():
            try:
                return packed.geometry.on(self.actions.ensure(packed.value))
            except PlanMismatch as error:
                self.mismatches.append(str(error))  # the value is lost, but later steps need not lose it
                raise

    def _read_beside(self, packed: Handle) -> torch.Tensor:
        """Answer a read on another stream: autograd runs nodes on their op's stream, CPU nodes on the caller's."""
        with self.arena.at_home():
            tensor = self._read(packed)
        with torch._C._DisableTorchDispatch():
            self.arena.join([storage_of(tensor)])
        return tensor

    def _tell_read(self) -> None:
        with self.actions.lock:  # if two threads read first, only one reports it
            on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read()

    def _before_read(self, value: int) -> None:
        slot = self.table.anchor_of.get(value)
        if slot is not None and self.on_path and self.actions.is_due(slot):
            with torch._C._DisableTorchDispatch(), self.arena.at_home():
                self._act(slot)
            self.stats.host_step_ms = (time.perf_counter() - self.begin) * 1000


def _kind(fingerprint: str) -> str:
    """Return the operator alone, so that shapes that change from step to step are reported once."""
    return fingerprint.partition("(")[0]
