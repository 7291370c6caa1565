"""A step that no plan knows, as the dispatch mode and the saved tensor hooks drive it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...machine import Call, Level, Recipes, Value
from ...machine.recipes import Resolve
from ...machine.values import Place
from ...torchtools.effects import StorageMap, changed_statistics, find_plain_keys, written_tensors
from ...torchtools.endings import end_with
from ...torchtools.operators import call_refusal, has_undefined_bytes, is_foreign
from ...torchtools.tensors import (
    copied_storage,
    has_plain_storage,
    may_move,
    storage_key,
    storage_of,
    tensors_with_memory,
)
from ..leaving import cause_of
from ..records import OnlineHandle, Reassigned, changed_in_place, pack_kept
from ..replay import MadeArgument, OuterArgument, RecordedCall, record_call, replay_call, tensor_arguments
from ..silence import SavedTensors, Silence
from ..statistics import RunStats
from ..verification import Difference, new_witness
from .evictor import Evictor
from .tier import OnlineTier

# Values that the step itself numbers. A plan numbers its own from 0.
_FIRST_VALUE = 2**40


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a value: the same in all steps that do the same.

    Attributes:
        key: Tells it from others: the ops that lead to the value, and how they follow one another.
        is_foreign: Whether one of them is not PyTorch's own.
    """

    key: Hashable
    is_foreign: bool


@dataclass(slots=True)
class Effort:
    """What being able to replay costs a step, and what it gains.

    Attributes:
        recording_ms: Time that recording its ops has taken.
        gained_ms: By how much copying what was dropped would have taken longer than replaying it.
    """

    recording_ms: float = 0.0
    gained_ms: float = 0.0


@dataclass(slots=True)
class _Running:
    """The op that is running: its call, if it can be replayed, and what it changes without saying so."""

    call: RecordedCall | None
    statistics: list[torch.Tensor]
    begun_s: float
    start_s: float
    stall_ms: float
    is_alone: bool = True


class OnlineStep(SavedTensors):
    """The state of one step under an evictor, from its forward pass to the end of its backward pass.

    It lives as long as autograd holds one of its handles.

    Args:
        evictor: Holds the budget.
        values: Values that storages hold, if something else has begun to number them.
        replays: Whether a dispatch mode passes its ops, so that values can be replayed. Otherwise they are copied, and
            autograd's saves are all that the step sees.
        copies_ahead: Whether values are copied out ahead of need.

    Attributes:
        effort: What replaying has cost and gained so far.
    """

    def __init__(
        self, evictor: Evictor, values: StorageMap | None = None, *, replays: bool = True, copies_ahead: bool = True
    ) -> None:
        self.evictor, self.replays, self._copies_ahead = evictor, replays, copies_ahead
        self.effort = Effort()
        self.tier = OnlineTier(evictor.engine, evictor.host_bytes)
        self.arena = self.tier  # what the dispatch mode asks for streams
        self.values = StorageMap() if values is None else values
        self.saved: dict[int, Value] = {}
        self.op = threading.Lock()
        self.recipes = Recipes(self.saved, self, evictor.speed)
        self._numbers = itertools.count(_FIRST_VALUE)
        self.thread = threading.get_ident()  # that runs the step: the one of its backward pass, once that has begun
        self._begin_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._running: _Running | None = None  # of the thread that holds `op`
        self._running_thread = 0
        self._readers: dict[int, list[Call]] = {}  # by the storage of a tensor from outside of the step
        self._in_parts: set[int] = set()  # storages that autograd holds for earlier contents as well
        self._unsafe: set[int] = set()  # storages whose address the program has
        self.reassigned = Reassigned()
        end_with(self, self.tier.close)

    # The forward pass -------------------------------------------------------------------------------------------------

    def begin_op(self) -> bool:
        """Whether the op that begins is the only one running. Of ops that overlap, none can be replayed."""
        if self.op.acquire(blocking=False):
            self._running, self._running_thread = None, threading.get_ident()
            return True
        running = self._running
        if running is not None:
            running.is_alone = False
        return False

    def before_op(self, func: Any, facts: Any, args: Any, kwargs: Any, written: dict[int, torch.Tensor]) -> None:
        """Record the call, and prepare for what it writes over."""
        begun_s = time.perf_counter()
        statistics = changed_statistics(facts, func, args)
        self._outer_changes([*written, *map(storage_key, statistics)])
        inside = True
        for key in written:
            value = self.values.get(key)
            inside = inside and value is not None and value >= 0
            self.overwritten(value)
        self.evictor.look_before((args, kwargs))
        if not self._is_mine():
            return
        # An op that changes a tensor from outside cannot run a second time.
        refused = not inside or facts.refusal or (facts.depends_on_call and call_refusal(func, args))
        # Nor can one that a mode of the program's around the step may change, as that sees no replay.
        refused = refused or torch._C._len_torch_dispatch_stack() > 0
        call = None if refused else record_call(func, facts, args, kwargs, self.values, self.evictor.device)
        self._running = _Running(call, statistics, begun_s, time.perf_counter(), self.evictor.stall_ms)

    def _is_mine(self) -> bool:
        """Whether the calling thread runs the op that holds `op`. Of ops that overlap, only one does."""
        return self.op.locked() and self._running_thread == threading.get_ident()

    def after_op(self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]) -> None:
        """Number the results, and keep the call that made them if it can be replayed."""
        ended_s = time.perf_counter()
        writes = tuple(self._bind(tensor) for tensor in made)
        running = self._running if self._is_mine() else None
        if running is not None:
            self._running = None
            for tensor in running.statistics:
                if self.values.get(storage_key(tensor)) is not None:
                    self._bind(tensor)
            if running.call is not None and running.is_alone and all(map(has_plain_storage, outputs)):
                elapsed_ms = (ended_s - running.start_s) * 1000 - (self.evictor.stall_ms - running.stall_ms)
                self._keep(running.call, writes, max(elapsed_ms, 0.0))
            self.effort.recording_ms += (time.perf_counter() - ended_s + running.start_s - running.begun_s) * 1000
        self.evictor.write_ahead()

    def _keep(self, call: RecordedCall, writes: tuple[int, ...], time_ms: float) -> None:
        """Keep a call, if all that it reads can be replayed or comes from outside of the step."""
        reads: dict[int, None] = {}
        outer: list[OuterArgument] = []
        for argument in tensor_arguments(call):
            if isinstance(argument, MadeArgument):
                reads[argument.value] = None
            else:
                outer.append(argument)
        if not all(value in self.recipes for value in reads):
            return
        if not all(self._is_from_outside(each.tensor) for each in outer):
            return
        if not self._unsafe.isdisjoint(storage_key(each.tensor) for each in outer if has_plain_storage(each.tensor)):
            return
        sources = [(value, source) for value in reads if (source := self.recipes.of(value)) is not None]
        places = (source.writes.index(value) for value, source in sources)
        recipe = hash((call.func, *(source.recipe for _, source in sources), *places))
        foreign = is_foreign(call.func) or any(source.is_foreign for _, source in sources)
        self.evictor.verification.note_place(recipe)
        kept = Call(call, tuple(reads), writes, time_ms, recipe, foreign)
        self.recipes.add(kept)
        for each in outer:
            self._readers.setdefault(storage_key(each.tensor), []).append(kept)

    def _is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that holds no value of the step was there before it, or is a view of one that was.

        Others may hold this step through their history, and only the collector would free them.
        """
        if not has_plain_storage(tensor):
            return False
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.grad_fn is None:
            return True
        return base.grad_fn._sequence_nr() < self._begin_number

    def recipe(self, value: int) -> Recipe | None:
        """Return what makes a value again, or None if nothing does or it cannot be compared."""
        call = self.recipes.of(value)
        if call is None:
            return None
        position = call.writes.index(value)
        if has_undefined_bytes(str(call.call.func), position):
            return None
        return Recipe((call.recipe, position), call.is_foreign)

    def difference(self, value: int, was_survived: bool) -> Difference:
        """Return what to tell of a replay of a value that gave something else."""
        call = self.recipes.of(value)
        assert call is not None, "it was replayed just now"
        module = self.evictor.verification.place_of(call.recipe)
        return Difference(str(call.call.func), module, cause_of(call.call), was_survived)

    def look(self, arguments: Any, handed_out: bool = False) -> None:
        """Note that the program reads tensors without an op, and whether it obtains their address."""
        if handed_out:
            with torch._C._DisableTorchDispatch():
                self.handed_out(arguments)

    def data_assigned(self, tensor: torch.Tensor) -> None:
        """Note that the program is about to give a tensor other data."""
        if has_plain_storage(tensor):
            self.reassigned.note(tensor, self.values.get(storage_key(tensor)))

    def handed_out(self, arguments: Any) -> None:
        """Note that the program obtains the address of tensors, so that they may change and nothing tells.

        What is made from them is not replayed, and they stay until the program has released them.
        """
        tensors = [tensor for tensor in tensors_with_memory(arguments)[0] if has_plain_storage(tensor)]
        keys = list(dict.fromkeys(map(storage_key, tensors)))
        values = {value for value in map(self.values.get, keys) if value is not None}
        self._unsafe.update(keys)
        readers = self.recipes.readers(values)
        self._changes([*readers, *(call for key in keys for call in self._readers.pop(key, ()))])

    def _outer_changes(self, keys: list[int]) -> None:
        """Prepare for an op that changes tensors from outside: what is replayed from them has to be there before."""
        self._changes([call for key in keys for call in self._readers.pop(key, ())])

    def _changes(self, calls: list[Call]) -> None:
        """Prepare for a change after which calls would not give the same any more."""
        if calls:
            with self.evictor.lock, torch._C._DisableTorchDispatch(), self.tier.at_home():
                self.recipes.give_up(calls)

    def beside(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op on another stream of the program: values that it works on cannot be replayed."""
        for key, tensor in written_tensors(facts, args, kwargs).items():
            self.overwritten(self.values.get(key))
            self._bind(tensor)
        for key in find_plain_keys((args, kwargs)):
            value = self.values.get(key)
            saved = self.saved.get(value) if value is not None else None
            if saved is not None and saved.storage is not None:
                self.tier.join([saved.storage])

    def unseen(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op of a compiled function that is about to run: what it writes cannot be replayed."""
        written = written_tensors(facts, args, kwargs)
        self._outer_changes([*written])
        for key, tensor in written.items():
            self.overwritten(self.values.get(key))
            self._bind(tensor)

    def overwritten(self, value: int | None) -> None:
        """Note that an op is about to write over a value."""
        saved = self.saved.pop(value, None) if value is not None else None
        if saved is not None:
            if saved.storage is not None:
                self._in_parts.add(saved.storage._cdata)
            self.evictor.overwritten(saved)

    def _bind(self, tensor: torch.Tensor) -> int:
        value = next(self._numbers)
        self.values.bind(storage_of(tensor), value)
        return value

    # Saving and reading -----------------------------------------------------------------------------------------------

    def silenced(self) -> tuple[Silence, RunStats]:
        """Return what tells what is not governed, and the counters of the step."""
        return self.evictor.silence, self.evictor.stats

    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        if not may_move(tensor):
            return self.keep_silent(tensor)
        value = self.values.get(storage_of(tensor)._cdata)
        if value is None and not self.replays and _may_leave(tensor):
            value = self._bind(tensor)
        if value is None or value < 0:
            return pack_kept(tensor, value)
        with torch._C._DisableTorchDispatch():
            handle = self.hold(tensor, value, self)
            if not self.replays and self._copies_ahead:
                self.evictor.write_ahead()
            return handle

    def hold(self, tensor: torch.Tensor, value: int, owner: object) -> OnlineHandle:
        """Return the handle for a tensor on a value of the step.

        Args:
            tensor: The tensor that autograd saves.
            value: The value in its storage.
            owner: What the handle keeps alive.
        """
        evictor = self.evictor
        with evictor.lock:
            saved = self.saved.get(value)
            if saved is None:
                saved = Value(value, self, storage_of(tensor))
                saved.saved_at = evictor.next_save()
                saved.is_shared = storage_of(tensor)._cdata in self._in_parts
                self.saved[value] = saved
                if self._is_governed(tensor):
                    evictor.saved(saved)
            elif saved.storage is None:  # it left, and something made the tensor again
                saved.storage = storage_of(tensor)
            return OnlineHandle(owner, saved, tensor, evictor.lock.end)

    def _is_governed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device whose budget is held.

        What lies elsewhere stays, as it would come back to this one. The host reads the seed of an attention kernel.
        """
        device = self.evictor.device
        return tensor.device.type == device.type and device.index in (None, tensor.device.index)

    def unpack_plain(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads."""
        if self.reassigned and (other := self.reassigned.instead_of(packed)) is not None:
            return other
        if isinstance(packed, OnlineHandle):
            return self.read(packed)
        if type(packed) is tuple:
            tensor, version, _, _ = packed
            if tensor._version != version:
                raise changed_in_place(f"{tensor.type()} {list(tensor.shape)}")
            return tensor  # type: ignore[no-any-return]
        assert isinstance(packed, torch.Tensor)
        return packed

    def read(self, packed: OnlineHandle) -> torch.Tensor:
        """Return the tensor of a handle, bringing its bytes back if they are away."""
        evictor, saved = self.evictor, packed.value
        self.thread = threading.get_ident()
        packed.check()
        evictor.hold()
        with evictor.lock, torch._C._DisableTorchDispatch(), self.tier.at_home():
            evictor.reading(saved)
            evictor.look(2 * saved.size_bytes)
            storage = evictor.ensure(saved)
            tensor = packed.geometry.on(storage)
            self.values.bind(storage, saved.number)
            saved.is_busy = True  # `tensor` holds it from here on; nothing may be dropped in vain
            try:
                evictor.read_ahead(saved)
            finally:
                saved.is_busy = False
        if self.tier.is_beside():
            self.tier.join([storage])
        return tensor

    def end_forward(self) -> None:
        """End the forward pass."""

    # Leaving and coming back: what the evictor asks for ---------------------------------------------------------------

    def take_place(self, size_bytes: int) -> Place | None:
        """Return room for a value, or None if the tier has no more."""
        return self.tier.take(size_bytes)

    def released(self, number: int) -> None:
        """Note that autograd holds no handle on a value any more."""
        self.saved.pop(number, None)

    def gained(self, gained_ms: float) -> None:
        """Note by how much copying what was dropped would have taken longer than replaying it."""
        self.effort.gained_ms += gained_ms

    def remember(self, value: Value) -> None:
        """Remember the bytes of a value that leaves to be replayed, and copy them if its recipe is not proven."""
        recipe, storage, verification = self.recipe(value.number), value.storage, self.evictor.verification
        if recipe is None or storage is None:
            return
        level = verification.level(recipe.key, is_foreign=recipe.is_foreign, device_type=storage.device.type)
        value.witness = None
        if level == Level.NONE:
            return
        value.witness = witness = new_witness(recipe.key, level)
        witness.take(storage)
        place = self.tier.take(value.size_bytes) if level == Level.COPIED else None
        if place is not None:
            witness.start_copy(place, storage)
            witness.finish_copy()
            self.evictor.stats.verified_bytes += value.size_bytes

    def check(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs.

        Raises:
            ReplayDiffers: If it differs and there is no copy.
        """
        if value.witness is not None:
            self.evictor.verification.compare(value.witness, storage, partial(self.difference, value.number))

    def forget_costs(self) -> None:
        """Forget the costs of replays, since a value has come or gone."""
        self.recipes.forget_costs()

    def replay_ms(self, number: int) -> float:
        """Return the time in ms to replay a value from what is at hand now, or infinity if it cannot be replayed."""
        return self.recipes.replay_ms(number)

    def make_again(self, number: int) -> torch.UntypedStorage:
        """Replay a value from what is at hand."""
        storage: torch.UntypedStorage = self.recipes.make_again(number)
        return storage

    def ensure(self, value: Value) -> torch.UntypedStorage:
        """Return a value's storage on the device."""
        storage: torch.UntypedStorage = self.evictor.ensure(value)
        return storage

    def replay(self, call: RecordedCall, resolve: Resolve) -> list[torch.UntypedStorage]:
        """Run a call again."""
        storages = replay_call(call, resolve)
        self.evictor.stats.recomputed_ops += 1
        return storages

    def copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage."""
        return copied_storage(storage)

    def is_banned(self, call: Call, number: int) -> bool:
        """Whether a replay of a value gave something else before."""
        return self.evictor.verification.is_banned((call.recipe, call.writes.index(number)))


def _may_leave(tensor: torch.Tensor) -> bool:
    """Whether a tensor of unknown origin can leave once nothing else holds its storage.

    A parameter may be given other data, memory that PyTorch did not allocate can change without its knowledge, and
    nothing tells whether a conjugate view was changed.
    """
    is_parameter = tensor.is_leaf and tensor.requires_grad
    return not (is_parameter or tensor.is_conj() or tensor.is_neg()) and storage_of(tensor).resizable()
