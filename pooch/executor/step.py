"""One step, as the dispatch mode and the saved tensor hooks drive it.

It sees four moments: before an op, after an op, autograd saves a tensor, autograd reads one. A plan, if there is one,
says what is to be done at each of them (`plan_guide.py`). Beneath it is the pressure of the budget
(`machine/pressure.py`), which is all that is left where the step leaves the path of its plan.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ground.errors import PlanMismatch
from ..machine import Call, Value
from ..torchtools.effects import changed_statistics, written_tensors
from ..torchtools.endings import end_with
from ..torchtools.operators import call_refusal
from ..torchtools.out_of_memory import is_out_of_memory, missing_bytes
from ..torchtools.outside import changed_in_place
from ..torchtools.tensors import (
    can_be_dropped,
    find_tensors,
    has_plain_storage,
    may_move,
    operator_of,
    storage_key,
    storage_of,
    tensors_with_memory,
)
from ..torchtools.watch import HANDLES, is_marked, storage_map
from .cursor import FIRST_VALUE
from .departure import remedy
from .evictor import Evictor
from .own_work import OWN_WORK
from .owner import ValueOwner
from .plan_guide import PlanGuide
from .planned_values import ANEW, PlannedValues
from .recording import CallRecorder, read_by, unplanned_calls
from .records import Handle, KeptTensor, Reassigned, handle_on, pack_kept
from .replay import record_call
from .silence import SavedTensors, Silence
from .statistics import RunStats
from .table import Advice, OnMismatch, cursor_of
from .tier import StepTier


class Step(SavedTensors):
    """The state of one step, from its forward pass to the end of its backward pass.

    It lives as long as autograd holds one of its handles, so each of several forward passes before one backward pass
    has its own.

    Args:
        evictor: Holds the budget.
        advice: The plan that it follows, or None.
        replays: Whether a dispatch mode passes its ops, so that values can be replayed. Otherwise they are copied, and
            autograd's saves are all that the step sees.
        copies_ahead: Whether values are copied out ahead of need.

    Attributes:
        guide: What the plan has it do, or None.
        cursor: Where it is on the path of its plan, and what the native watch holds.
        owner: What the machine asks about its values.
        values: Which value each storage holds.
        mismatches: Why the schedule could not be carried out, where pressure has taken over for that.
        on_read: Called once, at the first read of a saved tensor.
        is_quiet: Whether nothing is told where the step leaves its path now.
        reads: What reads natively the values that no plan moves, as long as they are there, or None.
    """

    def __init__(
        self, evictor: Evictor, advice: Advice | None = None, *, replays: bool = True, copies_ahead: bool = True
    ) -> None:
        self.evictor, self.stats, self.lock = evictor, evictor.stats, evictor.lock
        self.replays, self._copies_ahead = replays, copies_ahead
        self.begin = time.perf_counter()
        self.values = storage_map()
        self.tier = StepTier(evictor.engine, evictor.host_bytes, None if advice is None else advice.arena)
        end_with(self, self.tier.close)
        self.owner = owner = ValueOwner(evictor, self.tier)
        self.recorder = CallRecorder(evictor, self.values, owner.recipes, owner.effort)
        self.cursor = cursor = self.recorder.cursor = cursor_of(None if advice is None else advice.table, self.values)
        owner.recipes.arriving = partial(unplanned_calls, cursor)
        self.op = self.recorder.op
        self.mismatches: list[str] = []
        self.reassigned = Reassigned()
        self.on_read: Callable[[], None] | None = None
        self._saved_before = evictor.saves  # the position from which a step without a plan counts its own
        self._in_parts: set[int] = set()  # storages that autograd holds for earlier contents as well
        self._kept: list[weakref.ref[KeptTensor]] = []
        self._written_over: set[int] = set()  # values that a plan keeps: no replay may read what is there now
        self.guide: PlanGuide | None = None
        self._on_mismatch: OnMismatch = "follow"
        self.is_quiet = False
        self.reads: Any = None
        self.graph: Any = None  # what numbers the values of the compiled graph that is running, if any
        if advice is not None:
            self._on_mismatch = advice.on_mismatch
            planned = PlannedValues(advice.table, advice.arena, evictor, owner.recipes, owner, cursor)
            owner.moves(planned)
            self.guide = PlanGuide(planned, owner.recipes)
            end_with(self, planned.close)
        evictor.keeps(self)

    @property
    def empties(self) -> bool:
        """Whether its plan empties what the program holds, so that every read must be seen."""
        return self.guide is not None and bool(self.guide.table.emptied)

    # The forward pass -------------------------------------------------------------------------------------------------

    def begin_op(self) -> bool:
        """Whether the op that begins is the only one running.

        Ops that overlap cannot be told apart, so the plan ends there, and none of them can be replayed.
        """
        if self.recorder.begins():
            return True
        self.overlaps()
        return False

    def overlaps(self) -> None:
        """Note that the op which begins is not the only one running."""
        if self.guide is not None and self.guide.on_path:
            self.leave_path("one op at a time", "an op that overlaps with one in another thread")

    def before_op(self, func: Any, facts: Any, args: Any, kwargs: Any, written: dict[int, torch.Tensor]) -> None:
        """Do what is due before an op, record its call if it may be replayed, and prepare for what it writes over."""
        guide = self.guide
        if guide is not None:
            if guide.on_path:
                self._follow(guide, func, facts, args, kwargs)
            self.bring_back((args, kwargs))
            if guide.values.waits_for_program:
                with self.lock:
                    guide.values.settle()
            self.recorder.preserve(func, facts, args, written)
            if guide.on_path:
                self.evictor.look(0)
                for key, tensor in written.items():
                    self.overwritten_in(key, tensor)
                return
        if self.recorder.reads_outside:
            changing = [*written, *map(storage_key, changed_statistics(facts, func, args))]
            self._changes(self.recorder.outdated(changing))
        can_repeat = True  # an op that changes a tensor from outside cannot run a second time
        for key, tensor in written.items():
            number = self.values.get(key)
            can_repeat = can_repeat and number is not None and number >= 0
            self.overwritten_in(key, tensor)
        self.evictor.look_before((args, kwargs))
        self.recorder.before(func, facts, args, kwargs, can_repeat=can_repeat)

    def after_op(self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]) -> None:
        """Match the op that ran against the plan, or keep its call if it can be replayed; number the results."""
        guide = self.guide
        if guide is not None and guide.on_path and self._recognised(guide, func, name, outputs, made):
            return
        ended_s = time.perf_counter()
        writes = tuple(self._bind(tensor) for tensor in made)
        for tensor in self.recorder.after(writes, outputs, ended_s):
            if self._value_in(tensor) is not None:
                self._bind(tensor)
        self.evictor.write_ahead()

    def can_try_again(self, error: Exception, facts: Any) -> bool:
        """Whether an op that has failed can run again: memory ran out, nothing was done yet, and there is more now."""
        nothing_done = not (facts.written or facts.written_names or facts.random or facts.is_foreign or facts.refusal)
        if not nothing_done or not is_out_of_memory(error) or not self.evictor.relieve():
            return False
        self.stats.ran_out_bytes = max(self.stats.ran_out_bytes, missing_bytes(error) or 1)
        return True

    def _bind(self, tensor: torch.Tensor) -> int:
        value: int = self.cursor.next_number()
        self.values.bind(storage_of(tensor), value)
        return value

    def end_forward(self) -> None:
        """End the region. Actions that are due next wait for the first read of the backward pass."""
        guide = self.guide
        if guide is None:
            return
        if guide.on_path and (missing := guide.missing_op()) is not None:
            self.leave_path(*missing)
        elif guide.on_path:
            guide.table.native_use.completed(guide.cursor)
        if guide.values.waits_for_program:
            with self.lock, torch._C._DisableTorchDispatch(), self.tier.at_home():
                guide.values.settle_all()

    # Following a plan -------------------------------------------------------------------------------------------------

    def _follow(self, guide: PlanGuide, func: Any, facts: Any, args: Any, kwargs: Any) -> None:
        """Run the actions that are due before the next op, and record its call if the plan replays it."""
        guide.reads_others = False
        if not guide.expects(facts):
            return
        slot = guide.slot
        if slot in guide.table.actions:
            self.act(guide, slot)
        if slot not in guide.table.replayed or not guide.on_path or guide.cursor.is_recorded:
            return
        if torch._C._len_torch_dispatch_stack() > 0:
            return  # a mode of the program's around the step may change what the op gives, and sees no replay
        refusal = call_refusal(func, args) if facts.depends_on_call else None
        if refusal is not None:
            self.leave_path(f"{facts.name} as an op that can be replayed", f"{facts.name}, which cannot: {refusal}")
            return
        gathered = guide.table.gathered
        call = record_call(func, facts, args, kwargs, self.values, self.evictor.device, gathered)
        reads, outer = read_by(call)
        guide.reads_others = not guide.table.has_at_hand(guide.cursor.position, reads)
        if not guide.reads_others:
            guide.record(call, reads, can_be_late=self.recorder.preserves(outer, gathered))

    def act_before_expected(self) -> None:
        """Do what is due before the op that is expected, which a native watch knows to be the one that runs."""
        guide = self.guide
        assert guide is not None
        self.act(guide, guide.slot)
        if guide.values.waits_for_program:
            with self.lock:
                guide.values.settle()

    def act(self, guide: PlanGuide, slot: int) -> None:
        """Run the actions of a slot. Where they cannot be run, the step goes on without its plan."""
        try:
            guide.act(slot)
        except PlanMismatch as error:
            self.cannot_act(error)

    def cannot_act(self, error: PlanMismatch) -> None:
        """Go on without the plan, as one of its actions cannot be run."""
        if self._on_mismatch == "error":
            raise error
        self.mismatches.append(str(error))
        self.leave_path("a step that the schedule is made for", f"another ({str(error).removesuffix(ANEW)})")

    def _recognised(
        self, guide: PlanGuide, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]
    ) -> bool:
        """Whether the plan knows the op that ran, whose results are registered then. An unknown op leaves the path."""
        found = guide.recognise(func, name, outputs, made)
        if isinstance(found, tuple):
            self.leave_path(*found)
            return False
        if found is None:
            for tensor in made:
                self.values.bind(storage_of(tensor), -1)
            return True
        for value, tensor in zip(found.writes, made, strict=True):
            storage = storage_of(tensor)
            self.values.bind(storage, value)
            guide.values.made(value, storage)
        return True

    def leave_path(self, expected: str, actual: str) -> None:
        """Have the plan fall silent. What it holds may leave from here on, as pressure has it."""
        guide = self.guide
        assert guide is not None
        guide.cursor.on_path = False
        guide.table.native_use.left(guide.cursor)
        self.stats.mismatches, self.stats.has_other_sizes = 1, operator_of(expected) == operator_of(actual)
        self.restore()
        guide.values.keep_what_is_held()
        text = f"the step left the planned path at op {guide.cursor.position}: expected {expected}, got {actual}"
        if self._on_mismatch == "error" and not self.is_quiet:
            raise PlanMismatch(f"{text}; {remedy()}")
        self.evictor.plan_left()
        with self.lock, torch._C._DisableTorchDispatch():
            self.let_kept_leave()
            self.owner.let_sources_leave()
        self.recorder.record_on(guide.table.gathered)
        if self._on_mismatch == "follow" or self.is_quiet:
            return
        if self.evictor.is_held:
            rest = "the budget is held without the plan, which takes longer"
        else:
            rest = "the rest of the step keeps its activations and may exceed the budget"
        self.evictor.warn_once(("path", operator_of(expected), operator_of(actual)), f"{text}; {rest} ({remedy()})")

    def bring_back(self, arguments: Any) -> None:
        """Bring back emptied values among arguments that the program is about to read."""
        guide = self.guide
        if guide is not None and guide.values.emptied.away:
            with self.lock, self.tier.at_home():
                guide.values.emptied.look(arguments)

    def restore(self) -> None:
        """Bring everything back that the program holds, since its reads are no longer intercepted."""
        guide = self.guide
        if guide is not None and guide.values.emptied.away:
            with OWN_WORK, torch._C._DisableTorchDispatch(), self.lock, self.tier.at_home():
                guide.values.emptied.restore()

    def let_kept_leave(self, least_bytes: int = 0) -> bool:
        """Register what is held on the device, so that it can leave, and return whether what is smaller stays.

        What was written over since stays too. Replays may read what is small. The caller holds the lock.
        """
        least_bytes = 0 if self.replays else least_bytes
        kept, self._kept = [each() for each in self._kept] + self.cursor.take_kept(least_bytes), []
        here = [] if self.guide is None else self.guide.values.may_leave()
        planned = [value for value in here if not value.saved_at]
        for each in kept:
            if each is None or each.tensor is None or each.tensor._version != each.version:
                continue
            if each.number in self._written_over or self.cursor.is_written_over(each.number):
                continue
            if self.values.get(storage_key(each.tensor)) == each.number:
                while planned and planned[0].number < each.number:
                    self.evictor.save(planned.pop(0))
                saved_at = None if self.guide is not None else self._saved_before + each.serial
                each.handle = self.hold(each.tensor, each.number, self, saved_at)
                each.tensor = None
        for value in planned:
            self.evictor.save(value)
        return least_bytes > 0 and self.cursor.has_kept

    def look_ahead(self) -> None:
        """Register what is held once the budget fills up, so that it is copied out ahead of need from here on."""
        if self.evictor.is_filling:
            with self.lock, torch._C._DisableTorchDispatch():
                self.let_kept_leave(self.evictor.small_bytes)

    def writing_over(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Return what tells in the backward pass whether neither autograd nor a replay will read the tensor again."""
        value, step = self.values.get(storage_key(tensor)), weakref.ref(self)

        def may_write() -> bool:
            here = step()  # the graph of the loss must not hold the step; without it there are neither
            if value is None or here is None or here.guide is None:
                return True
            return here.guide.values.is_at_its_end(value)

        return may_write

    # What else the program does ---------------------------------------------------------------------------------------

    def look(self, arguments: Any, handed_out: bool = False) -> None:
        """Note that the program reads tensors without an op. What was emptied of them is brought back.

        Args:
            arguments: What it reads, in any nesting.
            handed_out: Whether the program obtains the address of the memory.
        """
        if OWN_WORK.depth:
            return
        guide = self.guide
        if handed_out:
            with OWN_WORK, torch._C._DisableTorchDispatch():
                self._hand_out(arguments)
        if guide is not None and guide.on_path and guide.values.emptied.away:
            with OWN_WORK, torch._C._DisableTorchDispatch():
                self.bring_back(arguments)

    def _hand_out(self, arguments: Any) -> None:
        """Note that the program obtains the address of tensors, so that they may change and nothing tells.

        What is made from them is not replayed, and they stay until the program has released them.
        """
        tensors = [tensor for tensor in tensors_with_memory(arguments)[0] if has_plain_storage(tensor)]
        keys = list(dict.fromkeys(map(storage_key, tensors)))
        values = {value for value in map(self.values.get, keys) if value is not None and value >= 0}
        if self.guide is not None:
            self.guide.values.hand_out(arguments, self.values)
            if values:
                self.guide.values.distrust(values)
            if self.guide.on_path:
                return
        self._changes(self.recorder.outdated_by_address(keys, values))

    def data_assigned(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Note that the program is about to give a tensor other data, and return what is called once it has."""
        assigned = self.reassigned.note(tensor, self._value_in(tensor)) if has_plain_storage(tensor) else None
        self.cursor.is_reassigned = self.cursor.is_reassigned or assigned is not None
        return assigned

    def beside(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op that is about to run on another stream of the program, as FSDP's collectives and prefetchers do.

        It is not part of the plan, and is left alone unless it works on a value of the step.
        """
        guide = self.guide
        tensors = [tensor for tensor in find_tensors((args, kwargs)) if has_plain_storage(tensor)]
        moved = [storage_of(tensor) for tensor in tensors if self._moves(self._value_in(tensor))]
        if guide is not None and moved and guide.on_path:
            actual = f"{facts.name} on another stream, which works on a value of the plan"
            self.leave_path("an op on the stream that the region began on", actual)
        self.bring_back((args, kwargs))
        if moved:
            with self.lock:  # last, since only now do emptied storages have memory to tell the allocator of
                self.tier.join(moved)
        self._note_written(facts, args, kwargs)

    def _moves(self, number: int | None) -> bool:
        """Whether a value may be copied out or in, or be read by replays."""
        guide = self.guide
        if guide is not None and (number in guide.values.planned or number in guide.values.held):
            return True
        saved = self.owner.saved.get(number) if number is not None else None
        return saved is not None and saved.storage is not None

    def unseen(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Handle an op of a compiled function that is about to run. It is no part of the plan, but it may write."""
        self.bring_back((args, kwargs))
        self._note_written(facts, args, kwargs)

    def _note_written(self, facts: Any, args: Any, kwargs: Any) -> None:
        """Note that an op is about to write which cannot be replayed."""
        written = written_tensors(facts, args, kwargs)
        self._changes(self.recorder.outdated([*written]))
        for key, tensor in written.items():
            self.overwritten_in(key, tensor)
            if self.guide is None or not self.guide.on_path:
                self._bind(tensor)
            elif self.values.get(key) is not None:
                self.values.bind(storage_of(tensor), -1)

    def _value_in(self, tensor: torch.Tensor) -> int | None:
        return self.values.get(storage_key(tensor))  # type: ignore[no-any-return]

    def overwritten_in(self, key: int, tensor: torch.Tensor) -> None:
        """Note that an op is about to write over what a storage holds."""
        number = self.values.get(key)
        if number is not None:
            self.overwritten(number, storage_of(tensor))

    def overwritten(self, number: int, storage: torch.UntypedStorage) -> None:
        """Note that an op is about to write over a value.

        Args:
            number: Its number.
            storage: The storage that it is in.
        """
        guide = self.guide
        if guide is not None and number < FIRST_VALUE:
            if guide.values.protect(number, storage):
                return
            self._written_over.add(number)
        saved = self.owner.saved.pop(number, None)
        if saved is not None:
            if saved.storage is not None:
                self._in_parts.add(saved.storage._cdata)
            self.evictor.overwritten(saved)

    def replay_nothing(self) -> None:
        """Have nothing that was made so far made again from here on, but what a plan does."""
        replays = self.guide is not None and self.guide.table.recomputed
        self._changes([] if replays else self.owner.recipes.calls())

    def _changes(self, calls: list[Call]) -> None:
        """Prepare for a change after which calls would not give the same any more."""
        if calls:
            with self.lock, torch._C._DisableTorchDispatch(), self.tier.at_home():
                self.cursor.forget(self.owner.recipes.give_up(calls))

    # Saving and reading -----------------------------------------------------------------------------------------------

    def silenced(self) -> tuple[Silence, RunStats]:
        """Return what tells what is not governed, and the counters of the step."""
        return self.evictor.silence, self.stats

    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        if not may_move(tensor):
            return self.keep_silent(tensor)
        number = self.values.get(storage_of(tensor)._cdata)
        if number is None and self.graph is not None:
            number = self.graph.number(tensor)
        if number is None and not self.replays and can_be_dropped(tensor) and not is_marked(tensor):
            number = self._bind(tensor)
        if number is None or number < 0:
            return pack_kept(tensor, number)
        guide = self.guide
        if guide is not None:
            planned = guide.values.planned.get(number)
            if planned is not None:
                with torch._C._DisableTorchDispatch():  # not ops of the step
                    return guide.values.hold(self, planned, tensor, is_planned=guide.on_path)
            if guide.on_path:
                detached, version, _, identity = pack_kept(tensor, number)
                kept = KeptTensor(detached, version, number, identity)
                self._kept.append(weakref.ref(kept))
                return kept
        with torch._C._DisableTorchDispatch():
            saved_at = None if guide is not None else self._saved_before + self.cursor.next_save()
            handle = self.hold(tensor, number, self, saved_at)
            if not self.replays and self._copies_ahead:
                self.evictor.write_ahead()
            return handle

    def hold(self, tensor: torch.Tensor, number: int, owner: object, saved_at: int | None = None) -> Handle:
        """Return the handle for a tensor on a value that no plan moves.

        Args:
            tensor: The tensor that autograd saves.
            number: Number of the value in its storage.
            owner: What the handle keeps alive.
            saved_at: Position of the save among all. None: it is the next one.
        """
        with self.lock:
            saved = self.owner.saved.get(number)
            if saved is None:
                saved = Value(number, self.owner, storage_of(tensor))
                saved.is_shared = storage_of(tensor)._cdata in self._in_parts
                self.owner.saved[number] = saved
                if self._is_governed(tensor):
                    self.evictor.save(saved, saved_at)
            elif saved.storage is None:  # it left, and something made the tensor again
                saved.storage = storage_of(tensor)
                self.evictor.returned(saved)
            return handle_on(owner, saved, tensor, self.lock.end, self.reads)

    def _is_governed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device whose budget is held.

        What lies elsewhere stays, as it would come back to this one. The host reads the seed of an attention kernel.
        """
        device = self.evictor.device
        return tensor.device.type == device.type and device.index in (None, tensor.device.index)

    def unpack_plain(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads, after the actions tied to its first read."""
        self.stats.host_step_ms = (time.perf_counter() - self.begin) * 1000
        if self.on_read is not None:
            self.tell_read()
        if self.reassigned and (other := self.reassigned.instead_of(packed)) is not None:
            return other
        if type(packed) in HANDLES:
            return self.read(packed)  # type: ignore[arg-type]
        if isinstance(packed, tuple):
            return self._read_plain(*packed)
        if not isinstance(packed, torch.Tensor):
            return self._read_kept(packed)  # type: ignore[arg-type]
        return packed

    def _read_plain(self, tensor: torch.Tensor, version: int, number: int | None, _: object) -> torch.Tensor:
        self._before_read(number)
        if tensor._version != version:
            raise changed_in_place(tensor.type(), list(tensor.shape))
        return tensor

    def _read_kept(self, packed: KeptTensor) -> torch.Tensor:
        self.evictor.hold()
        self._before_read(packed.number)
        tensor = packed.tensor  # it may have been given a handle just now
        if tensor is None:
            assert packed.handle is not None
            return self.read(packed.handle)
        return self._read_plain(tensor, packed.version, None, None)

    def read(self, packed: Handle) -> torch.Tensor:
        """Return the tensor of a handle, bringing its bytes back if they are away."""
        evictor, value, guide = self.evictor, packed.value, self.guide
        self.owner.thread = threading.get_ident()
        evictor.hold()
        with self.lock, self.tier.at_home():  # wait for what another thread of autograd has begun
            self._before_read(value.number)
            packed.check()
            with torch._C._DisableTorchDispatch():
                if value.saved_at:
                    evictor.reading(value)
                evictor.look(2 * value.size_bytes)
                if guide is not None and value.number in guide.values.planned:
                    storage = self._ensure_planned(guide, value)
                else:
                    storage = evictor.ensure(value)
                    self.values.bind(storage, value.number)
                tensor = packed.on(storage)
                if value.saved_at:
                    self._read_ahead(value)
        if self.tier.is_beside():  # nodes run on their op's stream, and those of the CPU on the caller's
            with torch._C._DisableTorchDispatch():
                self.tier.join([storage])
        return tensor

    def _ensure_planned(self, guide: PlanGuide, value: Value) -> torch.UntypedStorage:
        try:
            return guide.values.ensure(value)
        except PlanMismatch as error:
            self.mismatches.append(str(error))  # the value is lost, but later steps need not lose it
            raise

    def _read_ahead(self, value: Value) -> None:
        """Bring back what the backward pass reads after a value, on which the caller has a tensor."""
        value.is_busy = True  # nothing may be dropped in vain
        try:
            self.evictor.read_ahead(value)
        finally:
            value.is_busy = False

    def tell_read(self) -> None:
        """Tell of the first read of the step, unless that is done."""
        with self.lock:  # if two threads read first, only one reports it
            on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read()

    def _before_read(self, number: int | None) -> None:
        """Run the actions that are due where the backward pass first reads a value."""
        guide = self.guide
        if guide is None or number is None:
            return
        slot = guide.table.anchor_of.get(number)
        if slot is not None and guide.on_path and guide.is_to_act(slot):
            with torch._C._DisableTorchDispatch(), self.tier.at_home():
                self.act(guide, slot)
            self.stats.host_step_ms = (time.perf_counter() - self.begin) * 1000
