"""What outlives the steps under a budget on a real device: parameters, buffers, gradients, states of optimizers, data.

They are found by looking at the models and their optimizers, where autograd has accumulated a gradient, and among what
the program holds. From then on their bytes may leave whenever nothing works on them, and are brought back before an op
does, wherever that is.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from ..ground.errors import TierError, UsageError
from ..ground.weakly import weakly
from ..machine.persistent import Kind, PersistentPlace, PersistentValue, PersistentValues
from ..machine.values import Owner
from ..torchtools.accelerators import has_streams
from ..torchtools.function_modes import past_subclasses
from ..torchtools.module_tensors import ModuleTensors, module_tensors
from ..torchtools.optimizer_slices import Load, StepNeeds
from ..torchtools.tensors import (
    find_tensors,
    gradient_of,
    has_plain_storage,
    memory_address,
    storage_key,
    storage_of,
    tensor_bytes,
)
from ..torchtools.watch import LIBRARY
from .evictor import Evictor
from .own_work import OWN_WORK
from .program_reads import ProgramReads
from .rooms import Rooms
from .slices import TEMPORARIES, Slice, loads, stepping_bytes
from .tier import StepTier

_LEAST_BYTES = 4096  # of a value: moving fewer takes longer than it gains
_LEAST_SHARE = 2**-14  # of the budget, likewise
_USES_AHEAD = 16  # uses that are looked at for what can be brought back before it is needed
_COPIES_AHEAD = 4
_TIMES_AS_FAR = 2  # as what is brought back ahead: what leaves for it is used later by so much
_NO_ROOM = "the swap tier has no room for them"
_HALF_MADE = (
    "a step of an optimizer has failed and cannot be undone, so that some of its numbers are stepped and others are "
    "not: load a checkpoint"
)


class _Owner(Owner):
    """The owner of values that outlive steps. What replays need of these is brought back as they run."""

    def make_again(self, number: int) -> Any:
        """Fail: nothing asks for it."""
        raise NotImplementedError


class PersistentMemory:
    """What outlives the steps under a budget, and may leave.

    Args:
        evictor: Holds the budget, and decides what leaves.
        budget_bytes: The budget.
        slice_bytes: How much of it ops on lists of tensors, such as those that clip gradients, work on at a time.

    Attributes:
        library: Watches ops natively.
        values: The values, in the order in which they leave.
        staying_bytes: Bytes that cannot leave, by the reason.
        reads: What the program reads without an op.

    Raises:
        UsageError: If ops are not watched natively here.
    """

    def __init__(self, evictor: Evictor, budget_bytes: int, slice_bytes: int) -> None:
        library = LIBRARY.get()
        if library is None:
            why = LIBRARY.why_not or "POOCH_NATIVE_WATCH is 0"
            raise UsageError(f"parameters and the state of optimizers cannot leave the device: {why}")
        self.library, self._evictor, self._slice_bytes = library, evictor, slice_bytes
        self._is_ordered = has_streams(evictor.device)
        self._least_bytes = max(_LEAST_BYTES, int(_LEAST_SHARE * budget_bytes))
        self._tier = StepTier(evictor.engine, evictor.host_bytes)
        self._rooms = Rooms(self._tier)
        self._owner = _Owner()
        self._numbers: dict[Hashable, int] = {}  # of values, by what they are: the same in each step
        self._homes: dict[int, Any] = {}
        self._hooks: dict[int, Any] = {}  # on parameters, by their ids
        self._ahead: dict[PersistentValue, int] = {}  # what comes back ahead of its use, with its last one before that
        self._spare_bytes = 0  # that reading ahead leaves free: without them, what has come has left again unused
        self._has_read_in_vain = False  # whether it has in this step
        self._far: list[PersistentValue] = []  # what could leave at this number of uses, what is used last at its end
        self._far_since = -_USES_AHEAD
        self._temporary_bytes = 0  # that stepping the largest parameter of the step that was asked for last takes
        self._slices: dict[int, Slice] = {}  # of optimizers' steps that are running, by their threads
        self.staying_bytes: Counter[str] = Counter()
        count_here_bytes = partial(library.here_bytes, evictor.device)
        self.values = evictor.persistent = PersistentValues(library.count_uses, count_here_bytes)
        _MEMORIES.add(self)
        self.reads = ProgramReads(self.values, self._homes, evictor.lock, self.bring_back)
        self.reads.begin()
        library.use_homes(_bring_back, slice_bytes)
        library.take_uses()

    @property
    def device(self) -> torch.device:
        """Where what may leave is."""
        return self._evictor.device

    @property
    def moved_bytes(self) -> int:
        """The bytes that have left and come back so far."""
        moved = self.values.moved
        return moved.out_bytes.total() + moved.in_bytes.total()

    # What there is ----------------------------------------------------------------------------------------------------

    @past_subclasses
    def begin_step(self, models: Iterable[torch.nn.Module]) -> None:
        """Note that a step begins, and look for what has appeared since the last one.

        Args:
            models: The models that are trained.
        """
        with self._evictor.lock:
            self.reads.end_calls()
            self._ahead.clear()
            if not self._has_read_in_vain:
                self._spare_bytes //= 2
            self._has_read_in_vain = False
            for value in self.values:
                if value.ticket is not None and value.ticket.is_done():  # it may hold what the program has released
                    self._evictor.store.finish_out(value, self._evictor.stats)
            for value in self.values.begin_step(self.library.take_uses()):
                self._forget(value)
            self.staying_bytes.clear()
            self.adopt_models(models)

    @past_subclasses
    def adopt_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Have parameters, gradients and buffers of further models leave where room is needed, from now on."""
        with self._evictor.lock:
            for model in models:
                self.adopt_model(model)

    def adopt_model(self, model: torch.nn.Module) -> None:
        """Have the parameters, gradients and buffers of a model leave where room is needed."""
        parameters, buffers = tensors = module_tensors(model)
        gradients = [gradient_of(parameter) for parameter in parameters]
        if not self.library.have_homes([parameters, gradients, buffers], self.device, self._least_bytes):
            for tensor, kind, what in _parts_of(tensors):
                self._adopt(tensor, kind, what)
        self._take_gradients(parameters)

    @past_subclasses
    def adopt_stepped(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have tensors that optimizers step and no model holds leave where room is needed, and their gradients."""
        with self._evictor.lock:
            for tensor in tensors:
                for part, kind, what in _parameter_and_gradient(tensor):
                    self._adopt(part, kind, what)
            self._take_gradients(tensors)

    def adopt_data(self, found: Iterable[Sequence[torch.Tensor]], *, is_given: bool = False) -> None:
        """Have what the program holds leave where room is needed.

        Args:
            found: Its tensors, those together that are on one storage: all that there are on it.
            is_given: Whether models are called with them, so that others take their place in the next step.
        """
        with self._evictor.lock:
            for place, (first, *others) in enumerate(found):
                what = ("given", place, tensor_bytes(first)) if is_given else ("data", storage_key(first))
                self._adopt(first, "data", what, others)

    def _take_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if tensor_bytes(parameter) < self._least_bytes:
                continue  # its gradient never leaves, and in many networks most parameters are as small
            hook = self._hooks.get(id(parameter))
            is_hooked = hook is not None and hook.hooks_dict_ref() is not None  # another one may have had this id
            if parameter.requires_grad and parameter.is_leaf and not is_hooked:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(weakly(self.accumulated))

    def move_in(self, model: torch.nn.Module) -> None:
        """Move a model to the device, one tensor after the other, each of which may have others leave."""
        device = self._evictor.device
        for tensor, kind, what in _parts_of(module_tensors(model)):
            if tensor.device != device:
                self._evictor.look(tensor.nbytes)
                tensor.data = tensor.data.to(device)
                with self._evictor.lock:
                    self._adopt(tensor, kind, what)

    def move_state_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state of an optimizer to where its parameters are, which may have others leave."""
        move_state(optimizer, self._evictor.look, lambda parameter: self.adopt_state(optimizer, [parameter]))

    def move_out(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Move models and states of optimizers to the host, one tensor after the other, as they do not fit here."""
        for model in models:
            for tensor, _, _ in _parts_of(module_tensors(model)):
                tensor.data = tensor.data.cpu()
        for optimizer in optimizers:
            move_state(optimizer)

    def bring_data_back(self) -> None:
        """Have what the program holds be there: a process that is about to be forked may read it, to load data."""
        self.bring_back(value for value in self.values if value.kind == "data" and not value.is_here)

    @property
    def fits(self) -> bool:
        """Whether everything has room on the device at once."""
        return self._evictor.live.now() + self.values.away_bytes().total() <= self._evictor.budget_bytes

    @past_subclasses
    def adopt_state(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Have the state that an optimizer has for some parameters leave where room is needed."""
        device, have_homes = self.device, self.library.have_homes
        with self._evictor.lock:
            for parameter in parameters:
                state = optimizer.state.get(parameter, {})
                if have_homes(state, device, self._least_bytes):
                    continue
                for name, held in state.items() if isinstance(state, dict) else ():  # some keep lists there
                    for number, tensor in enumerate(find_tensors(held)):
                        self._adopt(tensor, "state", (id(parameter), id(optimizer), name, number))

    @past_subclasses
    def accumulated(self, parameter: torch.Tensor) -> None:
        """Take over a gradient that autograd has accumulated."""
        with self._evictor.own_time, self._evictor.lock:
            gradient = parameter.grad
            if gradient is not None:
                self._adopt(gradient, "gradient", (id(parameter), "gradient"))
                self._write_ahead(self._values_in([gradient]).values())
                with torch._C._DisableTorchDispatch():
                    self._evictor.look(2 * tensor_bytes(gradient))

    def _adopt(self, tensor: torch.Tensor, kind: Kind, what: Hashable, others: Sequence[torch.Tensor] = ()) -> None:
        """Have a tensor leave where room is needed, unless something stands in the way, such as further tensors on it.

        Args:
            tensor: The tensor.
            kind: What it is.
            what: Tells it from others in each step.
            others: Further tensors on its storage that do not stand in the way.
        """
        if tensor.device != self._evictor.device or not has_plain_storage(tensor) or not self.library.is_plain(tensor):
            return
        key = storage_key(tensor)
        if key in self._homes:
            for each in (tensor, *others):
                if not self.library.is_marked(each):
                    self._homes[key].mark(each)
            return
        storage = storage_of(tensor)
        size_bytes = storage.nbytes()
        if size_bytes < self._least_bytes:
            return
        address = memory_address(storage)
        why = _why_not(storage, lambda: self.library.is_of_allocator(tensor))
        del storage
        if not why and self.library.tensors_beside(tensor) > 1 + len(others):
            why = "something else holds views of them"
        if not why and kind == "buffer" and self.library.references_to(tensor) > 1:  # no tensor of Python's own
            why = "something else works on them, such as a sparse tensor that is made of them"
        if why:
            self.staying_bytes[why] += size_bytes
            return
        home = self._homes[key] = self._new_home(tensor, kind, others)
        number = self._numbers.setdefault(what, len(self._numbers))
        value = PersistentValue(number, home, kind, self._owner, size_bytes)
        value.on_first_leave = self._evictor.live.uncounted(address, size_bytes)
        before = self.values.add(key, value)
        if before is not None and before.is_gone:
            self._give_back(before)
        place = self._rooms.take(size_bytes)
        if place is None:
            self.staying_bytes[_NO_ROOM] += size_bytes
        else:
            value.place = PersistentPlace(value, place, self.values.moved, is_ordered=self._is_ordered)
        self._evictor.live.resume()

    def _new_home(self, tensor: torch.Tensor, kind: Kind, others: Sequence[torch.Tensor]) -> Any:
        home = self.library.Home(tensor)
        for each in others:
            home.mark(each)
        if kind == "data" and self._is_ordered:  # such as a batch that a loader may move here ahead of its step
            home.stay_on_stream()
        return home

    def _forget(self, value: PersistentValue) -> None:
        self._evictor.store.settle(value)
        self._give_back(value)
        self._homes.pop(value.key, None)

    def _give_back(self, value: PersistentValue) -> None:
        place, value.place, value.spare = value.place or value.spare, None, None
        if isinstance(place, PersistentPlace):
            self._rooms.give_back(value.size_bytes, place.place)

    # Moving -----------------------------------------------------------------------------------------------------------

    def bring_back(self, values: Iterable[PersistentValue]) -> None:
        """Bring values back that are about to be used. What works on them keeps them where they are then.

        Raises:
            TierError: If one cannot be read back, not even when it is tried again.
        """
        evictor = self._evictor
        store, stats = evictor.store, evictor.stats
        with evictor.own_time, OWN_WORK, torch._C._DisableTorchDispatch(), evictor.lock, self._tier.at_home():
            values = [value for value in values if value.has_home]  # the budget may have ended while this thread waited
            evictor.look(2 * sum([value.size_bytes for value in values if value.storage is None]))
            for value in values:
                was_busy, value.is_busy = value.is_busy, True
                try:
                    if value.storage is None:
                        store.start_in(value, stats)
                    elif value.ticket is not None and not value.is_copied:
                        value.ticket.wait()  # a copy out reads what is about to be written
                    try:
                        store.finish_in(value, stats)
                    except TierError:  # such as of a thread that died while this was on its way ahead of need
                        store.start_in(value, stats)
                        store.finish_in(value, stats)
                finally:
                    value.is_busy = was_busy
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Start to bring back what is used next, in place of what is used much later if there is no room."""
        self._look_at_what_came()
        under_way = sum(value.state == "returning" for value in self._ahead)
        next_values = islice(self.values.used_next(_USES_AHEAD), max(0, _COPIES_AHEAD - under_way))
        self._ahead.update((value, value.last_use) for value in self._bring_ahead(next_values))

    def _bring_ahead(self, values: Iterable[PersistentValue], beside_bytes: int = 0) -> list[PersistentValue]:
        """Start to bring values back that are away, until there is no room, and return them.

        Args:
            values: The values.
            beside_bytes: How much has to stay free. As much as the value in any case.
        """
        begun: list[PersistentValue] = []
        live = self._evictor.live
        budget_bytes = self._evictor.budget_bytes - self._evictor.unasked_bytes
        for value in values:
            needed_bytes = value.size_bytes + max(value.size_bytes, beside_bytes)
            missing_bytes = live.recent() + needed_bytes + self._spare_bytes - budget_bytes
            if missing_bytes > 0 and not self._leave_ahead(missing_bytes, self.values.distance(value)):
                break
            self._evictor.store.start_in(value, self._evictor.stats)
            begun.append(value)
        return begun

    def _look_at_what_came(self) -> None:
        """Leave more free from here on if something that came back ahead of its use has left again before that."""
        for value, last_use in list(self._ahead.items()):
            is_used, is_away = value.last_use != last_use, value.is_away
            if is_used or is_away or value.is_gone:
                del self._ahead[value]
            if is_away and not (is_used or value.is_gone):
                self._spare_bytes, self._has_read_in_vain = self._spare_bytes + value.size_bytes, True

    def _leave_ahead(self, missing_bytes: int, distance: float) -> bool:
        """Let leave what is used last, where nobody has to wait for that, and return whether so many bytes are free.

        Args:
            missing_bytes: How many bytes are to be free.
            distance: What is used within about as many uses stays.
        """
        store, stats = self._evictor.store, self._evictor.stats
        uses = self.library.count_uses()
        if not 0 <= uses - self._far_since < _USES_AHEAD:
            self._far, self._far_since = self.values.farthest(), uses
        being_written: list[PersistentValue] = []
        while missing_bytes > 0 and self._far and len(being_written) < _COPIES_AHEAD:
            value = self._far[-1]
            if value.can_leave and not value.is_gone and value.state != "returning":
                if self.values.distance(value) < _TIMES_AS_FAR * (distance + _USES_AHEAD):
                    break
                if value.ticket is not None and value.ticket.is_done():
                    store.finish_out(value, stats)
                if value.is_copied:
                    missing_bytes -= store.drop(value)
                elif value.ticket is not None or self._is_written_ahead(value):
                    being_written.append(value)
            self._far.pop()
        self._far += reversed(being_written)
        return missing_bytes <= 0

    # Slices of an optimizer's step ------------------------------------------------------------------------------------

    @past_subclasses
    def loads(
        self,
        optimizer: torch.optim.Optimizer,
        slices: Sequence[Sequence[torch.Tensor]],
        needs: StepNeeds | None,
    ) -> list[Load]:
        """Return what each of some slices of an optimizer's step takes of what is free now.

        Args:
            optimizer: The optimizer.
            slices: The parameters of each of them.
            needs: What is known of its step, or None.
        """
        with self._evictor.lock:
            if not self._evictor.live.asks:
                needs = None  # nobody is asked for more room if it takes more than small parameters have shown
            largest_bytes = max([parameter.nbytes for parameters in slices for parameter in parameters], default=0)
            self._temporary_bytes = int((TEMPORARIES if needs is None else needs.alone) * largest_bytes)
            free_bytes = self._evictor.budget_bytes - self._evictor.unasked_bytes - self._evictor.live.now()
            return loads(optimizer, slices, self._values_in, needs, free_bytes, self._slice_bytes)

    @past_subclasses
    def begin_slice(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Prepare for a step of some parameters: all that it changes is there, and can be as before if it fails."""
        with self._evictor.lock:
            self.adopt_state(optimizer, parameters)  # what something else than a step has made
            changed = self._changed(optimizer, parameters)
            here = {key for key, value in changed.items() if value.is_only_here}
            if changed and len(here) == len(changed):
                self._evictor.look(stepping_bytes(optimizer, parameters))
                return  # nothing of it moves: it is as in plain training
            others_bytes = self._evictor.live.now() - self.values.here_bytes()
            room_bytes = self._evictor.budget_bytes - self._evictor.unasked_bytes - max(0, others_bytes)
            current = self._slices[threading.get_ident()] = Slice(
                self._evictor,
                optimizer,
                parameters,
                changed,
                here,
                self._rooms,
                room_bytes,
                self._least_bytes,
                self.library.keys_of,
            )
            current.begin(self.bring_back)

    @past_subclasses
    def begin_next(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Start to bring back what the next step of some parameters needs, before what this one changes is copied out.

        Copies are made one after the other: what is copied out first would be waited for.
        """
        evictor = self._evictor
        with evictor.own_time, torch._C._DisableTorchDispatch(), evictor.lock, self._tier.at_home():
            changed = self._changed(optimizer, parameters).values()
            read = self._values_in([each.grad for each in parameters]).values()
            away = dict.fromkeys([value for value in (*changed, *read) if value.is_away])
            copied_bytes = sum([value.size_bytes for value in changed if value not in away])
            self._bring_ahead(away, copied_bytes + self._temporary_bytes)

    @past_subclasses
    def begin_whole(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Prepare for a step of all parameters at once: what each op of it needs comes, and leaves after it.

        Copies of everything, by which it could be undone, may be more than there is room for: if it fails, it is as in
        plain training.
        """
        with self._evictor.lock:
            self.adopt_state(optimizer, parameters)
            self._evictor.look(max((stepping_bytes(optimizer, [each]) for each in parameters), default=0))

    @past_subclasses
    def end_slice(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Note that an optimizer has stepped some parameters, whose state has come to be or has changed."""
        current = self._slices.pop(threading.get_ident(), None)
        if current is not None:
            current.end()
        self.adopt_state(optimizer, parameters)
        with self._evictor.lock:
            self._write_ahead(self._changed(optimizer, parameters).values())

    @past_subclasses
    def undo_slice(self) -> None:
        """Have all be as before a step of some parameters, which has failed, if that can be."""
        current = self._slices.pop(threading.get_ident(), None)
        is_undone = False
        if current is not None:
            with torch._C._DisableTorchDispatch(), self._evictor.lock:
                is_undone = current.undo()
        if not is_undone and isinstance(sys.exception(), TierError):
            self._evictor.warn_once(_HALF_MADE, _HALF_MADE)

    def _changed(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
    ) -> dict[int, PersistentValue]:
        """Return what a step of an optimizer changes of some parameters and their state, as far as it may leave."""
        state = optimizer.state
        return self._values_in([(parameter, state.get(parameter)) for parameter in parameters])

    def _values_in(self, tensors: Any) -> dict[int, PersistentValue]:
        """Return the values of tensors in lists, tuples and dictionaries by their keys, each once."""
        return self.values.of_all(self.library.keys_of_homes(tensors))

    def _write_ahead(self, values: Iterable[PersistentValue]) -> None:
        """Start to copy out what has just been written and will leave, so that nobody waits for that when it does."""
        for value in values:
            if value.leaves and value.place is not None:
                if value.ticket is not None:
                    self._evictor.store.finish_out(value, self._evictor.stats)
                self._is_written_ahead(value)

    def _is_written_ahead(self, value: PersistentValue) -> bool:
        """Whether a copy of a value begins now, as it has left since the last copy ahead of need."""
        if not value.leaves or value.place is None or value.state != "here":
            return False
        self._evictor.store.start_out(value, value.place, self._evictor.stats)
        value.leaves = False  # until it does
        return True

    def let_state_leave(self, missing_bytes: float) -> None:
        """Have so many bytes of the state of optimizers leave, what they will use last first.

        Args:
            missing_bytes: How many. Infinity: all.
        """
        store, stats = self._evictor.store, self._evictor.stats
        with torch._C._DisableTorchDispatch(), self._evictor.lock, self._tier.at_home():
            leaving: list[PersistentValue] = []
            for value in reversed(self.values.farthest()):
                if missing_bytes <= 0:
                    break
                if value.kind == "state":
                    leaving.append(value)
                    missing_bytes -= value.size_bytes
            for value in leaving:
                store.finish_out(value, stats)
                if not value.is_copied and value.place is not None:
                    store.start_out(value, value.place, stats)
            for value in leaving:
                store.finish_out(value, stats)
                if value.is_copied and not value.is_gone:
                    store.drop(value)

    def reserve(self, size_bytes: int) -> None:
        """Take room in the tier for what will leave, before anything else can take it."""
        self._tier.reserve(size_bytes)

    def make_room(self) -> None:
        """Have enough leave that the budget is held now."""
        missing_bytes = self._evictor.live.now() - self._evictor.budget_bytes
        if missing_bytes > 0:
            self._evictor.make_room(missing_bytes)

    # The end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Bring everything back, and let nothing leave any more.

        Raises:
            TierError: If something could not be read back, which stays away: whoever reads it meets an error.
        """
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        lost: TierError | None = None
        for value in self.values:
            if not value.is_gone:
                value.is_pinned = True
                try:
                    self.bring_back([value])
                except TierError as error:
                    lost = error
        with self._evictor.lock:  # another thread may be reading
            self._evictor.persistent = None
            self.reads.end()
            self._homes.clear()
            self._tier.close()
            _MEMORIES.discard(self)
            if lost is not None:
                raise lost
            self._ahead.clear()
            self._far = []
            self.values.clear()


_MEMORIES: weakref.WeakSet[PersistentMemory] = weakref.WeakSet()


def _bring_back(keys: list[int]) -> None:
    """Have the bytes of storages be there, given their keys, in whatever thread an op is about to read them."""
    for memory in list(_MEMORIES):
        values = [value for value in map(memory.values.of, keys) if value is not None]
        if values:
            memory.bring_back(values)


def _before_fork() -> None:
    for memory in list(_MEMORIES):
        memory.bring_data_back()


os.register_at_fork(before=_before_fork)


def _parts_of(tensors: ModuleTensors) -> Iterator[tuple[torch.Tensor, Kind, Hashable]]:
    """Yield what outlives the steps of a model: each tensor, its kind, and what tells it from others in each step."""
    for parameter in tensors.parameters:
        yield from _parameter_and_gradient(parameter)
    for buffer in tensors.buffers:
        yield buffer, "buffer", (id(buffer), "buffer")


def _parameter_and_gradient(parameter: torch.Tensor) -> Iterator[tuple[torch.Tensor, Kind, Hashable]]:
    if not parameter.is_leaf:
        return  # `functional_call` puts in its place what this step has computed
    yield parameter, "parameter", (id(parameter), "parameter")
    if parameter.grad is not None:
        yield parameter.grad, "gradient", (id(parameter), "gradient")


def move_state(
    optimizer: torch.optim.Optimizer,
    before: Callable[[int], object] = lambda _: None,
    after: Callable[[torch.Tensor], object] = lambda _: None,
) -> None:
    """Move the state of an optimizer to where its parameters are, but for what has one number alone.

    Args:
        optimizer: The optimizer.
        before: Called with the bytes that are about to be moved.
        after: Called with the parameter of which some state was moved.
    """
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.device != parameter.device:
                before(tensor.nbytes)
                state[name] = tensor.to(parameter.device)
                after(parameter)


def _why_not(storage: torch.UntypedStorage, is_of_allocator: Callable[[], bool]) -> str:
    """Return why the bytes of a storage cannot be taken from it, or "".

    Args:
        storage: The storage.
        is_of_allocator: Whether its memory is PyTorch's, as that of what `torch.load` reads, which cannot be resized.
    """
    if not (storage.resizable() or is_of_allocator()):
        return "their memory is not PyTorch's, as that of a mapped file, of an array or of what processes share"
    if storage.device.type == "cpu" and storage.is_shared():
        return "their memory is shared with other processes"
    return ""
