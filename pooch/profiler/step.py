"""Records a whole step: the forward pass under the recorder, the backward pass as plain training runs it.

No dispatch mode is active during the backward pass. Autograd checks for one, and if it finds one it no longer adds
gradients in place, so a mode would change the very memory that is measured. The backward pass is read from a trace
instead.

A profile needs to know when the program itself releases each value. What autograd saves is held by the records of an
evictor, so the storage's reference count tells: as soon as nothing but the record holds it, the program has released
it. Whatever leaves the device meanwhile, the record is that of a step of which nothing leaves.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..executor.compiled import FirstCall, RecordedGraphs
from ..executor.evictor import Evictor
from ..executor.memory import released
from ..executor.records import pack_kept
from ..executor.statistics import RunStats
from ..executor.step import Step
from ..ground.errors import ProfileError
from ..machine import Value
from ..machine.values import Storage
from ..torchtools.calls import compiled_part
from ..torchtools.copier import LEAST_PACKED_BYTES, is_packed
from ..torchtools.effects import written_tensors
from ..torchtools.memory_trace import CollectorOff, MemoryTrace, MemoryTracer, marker
from ..torchtools.mode_stacks import LooseStack, Undoing
from ..torchtools.operators import operator_facts
from ..torchtools.other_profilers import told_of_profilers
from ..torchtools.ranks import is_distributed
from ..torchtools.raw_looks import RawLooks
from ..torchtools.sharding import reshard
from ..torchtools.split import judging_writes
from ..torchtools.standing_aside import CompiledCalls, StepHooks
from ..torchtools.tensors import gradient_of, has_plain_storage, memory_address, storage_key, storage_of
from ..torchtools.thread_tracer import ThreadTracer, started_tracer
from ..torchtools.threads import OwnThread
from ..torchtools.watch import address_of, is_away
from .absences import without_absences
from .recorder import ForwardRecorder, named_tensors

Forward = Callable[[], torch.Tensor]
ROOM = "room"  # begins the names of markers around what makes room in the midst of an op
RUNS_BACKWARD = "the forward pass itself runs a backward pass: profile a forward that only computes the loss"


@dataclass(frozen=True, slots=True)
class Unpack:
    """One read of a saved value by the backward pass.

    Attributes:
        value: its id, or -1 for memory that is not ordinary.
        pointer: its address then.
        units: of FSDP's, whose parameters are gathered then.
    """

    value: int
    pointer: int
    units: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A recorded step: forward ops and values, reads of saved values by the backward pass in order, memory.

    `gradients` are (name of the parameter, address) of what the step has left as gradients.
    """

    recorder: ForwardRecorder
    unpacks: tuple[Unpack, ...]
    trace: MemoryTrace
    gradients: tuple[tuple[str, int], ...] = ()


def check_loss(loss: object) -> torch.Tensor:
    """Checks that a backward pass can start from what the forward pass returned.

    Raises:
        ProfileError: if it is not a tensor, is not a scalar, or does not require grad.
    """
    if not isinstance(loss, torch.Tensor):
        raise ProfileError(f"forward() returned {type(loss).__name__}, not a tensor: return the loss")
    if loss.numel() != 1:
        raise ProfileError(f"forward() returned a tensor of shape {tuple(loss.shape)}: return a scalar loss")
    if not loss.requires_grad:
        raise ProfileError("the loss does not require grad: no parameter with requires_grad=True contributes to it")
    return loss


class StepRecorder(ForwardRecorder):
    """A recorder that also finds when the program releases what autograd has saved."""

    def __init__(self, model: torch.nn.Module, step: Step) -> None:
        super().__init__(model)
        self._step_if_there = weakref.ref(step)  # the recorder waits for the collector, the step's tier must not
        self._held: dict[int, Value] = {}  # saved values that the program still holds

    @property
    def online(self) -> Step:
        """The step that holds what autograd saves."""
        step = self._step_if_there()
        assert step is not None, "it is running"
        return step

    def holds(self, value: int, saved: Value) -> None:
        """Watch for the program's release of a saved value."""
        self._held[value] = saved

    def note_contents(self, value: int, tensor: torch.Tensor) -> None:
        """Note whether the swap tier would pack what autograd saves: the first time counts."""
        record = self.values[value]
        if record.packs or tensor.device.type != "cpu" or record.size_bytes < LEAST_PACKED_BYTES:
            return
        if not is_away(storage_key(tensor)):  # such as that of a parameter whose step began in another thread
            record.packs = is_packed(storage_of(tensor))

    def note_releases(self) -> None:
        """Find values that the program has released since the last op."""
        for value in released(self._held):
            saved = self._held.pop(value)
            if saved.handles:  # else autograd has let go of it, the program need not have: the storage's end will tell
                self.note_release(value)

    def graph_begins(self) -> None:
        """Begins to record a compiled graph as an op."""
        self.note_releases()
        super().graph_begins()

    def graph_ends(self) -> None:
        """Records the compiled graph that ran, if any: it makes what it has saved."""
        super().graph_ends()
        self.online.evictor.write_ahead()

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.note_releases()
        facts = operator_facts(func)
        if facts.written or facts.written_names:
            for key, tensor in written_tensors(facts, args, kwargs).items():
                value = self._value_of.get(key)
                if value is not None:
                    self.online.overwritten(value, storage_of(tensor))
                    self._held.pop(value, None)  # the program releases what comes after it
        self.online.evictor.look_before((args, kwargs))
        return super()._dispatch(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any, call: int) -> tuple[Any, float]:
        evictor = self.online.evictor
        before_ms = evictor.stall_ms
        result, elapsed_ms = super()._run(func, args, kwargs, call)
        return result, max(0.0, elapsed_ms - (evictor.stall_ms - before_ms))


class StepTrace:
    """One step that is being recorded. Its forward pass lies between `open` and `close_forward`.

    While it is open the collector is off. It does not keep the models alive. Several threads may record a step each.
    Where torch's profiler has to record (see `needs_profiler`), one may, and a profiler of the user's ends it.

    Args:
        models: The models.
        step: The step that holds what autograd saves. It must not replay anything, as replays are no ops of the step.
        recorder: Records the forward pass. Also an attribute.
    """

    def __init__(self, models: Iterable[torch.nn.Module], step: Step, recorder: StepRecorder) -> None:
        self._models, self._step, self.recorder = [*map(weakref.ref, models)], step, recorder
        self._device = step.evictor.device
        self._tracer: MemoryTracer | ThreadTracer | None = None
        self._unpacks: list[Unpack] = []
        self._rooms = 0
        self._forward = LooseStack()
        self._session = Undoing()
        self._others: dict[Value, int] = {}
        self._thread = OwnThread()
        self._is_whole = True

    def open(self, compiled: Callable[[], None] | None = None, *, has_graphs: bool = False) -> None:
        """Begin to record, with the hooks for saved tensors in place until `close_forward`.

        Args:
            compiled: Called before the first compiled call, unless such calls are expected. It ends the recording.
            has_graphs: Whether they are expected, and recorded.
        """
        session = self._session
        collector = CollectorOff()
        session.add(collector.leave)
        collector.enter()  # it would free tensors at varying times
        evictor = self._step.evictor
        session.add(partial(setattr, evictor.store, "on_move", None))
        session.add(partial(setattr, evictor, "making_room", nullcontext))
        evictor.store.on_move, evictor.making_room = self._moved, self._making_room
        self._tracer = self._started_tracer()
        if isinstance(self._tracer, MemoryTracer):
            atexit.register(self.stop)  # an interpreter that ends with a session open crashes
            session.add(partial(atexit.unregister, self.stop))
            told = told_of_profilers(self._give_way)
            told.__enter__()
            session.add(partial(told.__exit__, None, None, None))
        calls = self._calls(compiled, has_graphs=has_graphs)
        self._forward.enter_context(StepHooks(self._pack, self._unpack, self._step.fell_silent, calls))

    def _calls(self, compiled: Callable[[], None] | None, *, has_graphs: bool) -> CompiledCalls | None:
        if has_graphs:
            return RecordedGraphs(self._step.evictor, self.recorder, self._was_compiled)
        return None if compiled is None else FirstCall(self._step, compiled)

    def _was_compiled(self) -> None:
        self._is_whole = False

    def _started_tracer(self) -> MemoryTracer | ThreadTracer:
        return started_tracer(self._device)

    def _moved(self, kind: str, moved: Value, storage: Storage | None) -> None:
        """Mark what the evictor does. Values of other steps that are alive get numbers that no value has.

        What another thread has it do is not on record, unless torch's profiler follows it there, as into the thread
        in which autograd runs the backward pass of a device.
        """
        if not self._thread.is_here and not (isinstance(self._tracer, MemoryTracer) and is_profiling()):
            self._is_whole = False
            return
        is_ours = moved.owner() is self._step.owner
        value = moved.number if is_ours else -self._others.setdefault(moved, 1 + len(self._others))
        pointer = memory_address(storage) if isinstance(storage, torch.UntypedStorage) else 0
        with torch._C._DisableTorchDispatch(), marker(f"{kind} {value} {pointer} {moved.size_bytes}"):
            pass  # no call of the step, though an allocation between two calls may have asked for room

    def _making_room(self) -> AbstractContextManager[object]:
        """Mark how long an allocation takes to find room, which is no part of its op."""
        if not self._thread.is_here:
            return nullcontext()
        self._rooms += 1
        return marker(f"{ROOM} {self._rooms}")

    def _give_way(self) -> None:
        if self._thread.is_here:
            self._end_session()

    def _end_session(self) -> MemoryTrace | None:
        """Stop tracing, and return the trace, or None if that is over."""
        try:
            return None if self._tracer is None else self._tracer.stop()
        finally:
            self._tracer = None
            self._session.run()

    def close_forward(self) -> None:
        """End the forward pass: take what is in place for it away."""
        self.recorder.note_releases()
        self._forward.close()
        self.recorder.end_forward(self.living_models())

    def data_assigned(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Note that the program is about to give a tensor other data, and return what is called once it has."""
        if not has_plain_storage(tensor):
            return None
        return self._step.reassigned.note(tensor, self.recorder._value_of.get(storage_key(tensor)))

    def writing_over(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Return what tells in the backward pass whether autograd holds a tensor's value for a single read.

        References do not show how often it has saved it.
        """
        value, held_by = self.recorder._value_of.get(storage_key(tensor)), weakref.ref(self._step)

        def may_write() -> bool:
            step = held_by()
            saved = None if step is None or value is None else step.owner.saved.get(value)
            return saved is None or saved.handles <= 1

        return may_write

    def living_models(self) -> list[torch.nn.Module]:
        """Return the models that the program has not let go of."""
        return [model for model in (reference() for reference in self._models) if model is not None]

    def _pack(self, tensor: torch.Tensor) -> tuple[int | None, object]:
        recorder = self.recorder
        value = recorder.note_saved(tensor)
        if value is None:
            return None, self._step.keep_silent(tensor)
        with torch._C._DisableTorchDispatch(), recorder.unwatched():
            if recorder.values[value].role != "made":
                return value, pack_kept(tensor, value)
            handle = self._step.hold(tensor, value, self)
            recorder.note_contents(value, tensor)
            recorder.holds(value, handle.value)
            return value, handle

    def _unpack(self, packed: tuple[int | None, object]) -> torch.Tensor:
        value, kept = packed
        if self._tracer is None:  # a later backward pass through the same graph
            return self._step.unpack(kept)
        with marker(f"unpack {len(self._unpacks)}"):
            tensor = self._step.unpack(kept)
        pointer = address_of(storage_of(tensor)) if has_plain_storage(tensor) else 0
        self._unpacks.append(Unpack(-1 if value is None else value, pointer, self.recorder.units_there()))
        return tensor

    def stop(self) -> None:
        """Give up. In another thread than the step's, hooks and modes stay, as does a session of torch's profiler."""
        self._forward.close()
        if self._thread.is_here or not isinstance(self._tracer, MemoryTracer):
            self._end_session()

    def end(self) -> StepRecord:
        """Stop recording after the backward pass, and return the step as if nothing had left the device.

        Raises:
            ProfileError: If the record has gaps.
        """
        if self._tracer is not None:
            with marker("end"):
                pass
        self._forward.close()
        trace = self._end_session()
        if trace is None or not self._is_whole or len(self.living_models()) < len(self._models):
            raise ProfileError("the step was not recorded to its end")
        values = self.recorder.values
        trace = without_absences(trace, values)
        unpacks = (
            replace(each, pointer=values[each.value].pointer) if each.value >= 0 else each for each in self._unpacks
        )
        gradients = gradients_of(self.living_models(), address_of)
        return StepRecord(self.recorder, tuple(unpacks), trace, gradients)


class _WholeStep(StepTrace):
    """A step whose forward pass does nothing but compute the loss."""

    _is_in_forward = True

    def _started_tracer(self) -> MemoryTracer | ThreadTracer:
        if not is_distributed():
            return super()._started_tracer()
        # Threads of gloo's let go of what they gathered sooner or later. Torch's profiler never sees that they did.
        tracer = MemoryTracer(self._device)
        tracer.start()
        return tracer

    def close_forward(self) -> None:
        """End the forward pass: take hooks away."""
        super().close_forward()
        self._is_in_forward = False

    def _unpack(self, packed: tuple[int | None, object]) -> torch.Tensor:
        if self._is_in_forward:
            raise ProfileError(RUNS_BACKWARD)
        return super()._unpack(packed)


def record_step(forward: Forward, model: torch.nn.Module, evictor: Evictor) -> StepRecord:
    """Runs one step and records it. What autograd saves leaves the device as the evictor has it.

    Raises:
        ProfileError: if no backward pass can start from what the forward pass returned, or it runs one itself.
    """
    step = Step(evictor)
    recorder = StepRecorder(model, step)
    trace = _WholeStep([model], step, recorder)
    gc.collect()
    evictor.begin_step(RunStats())
    try:
        is_compiled = compiled_part(model) is not None
        trace.open(has_graphs=is_compiled)
        reads = RawLooks(recorder.looked, trace.data_assigned)
        with recorder.path.watched(is_compiled=is_compiled), reads, judging_writes(trace.writing_over), recorder:
            loss = check_loss(forward())
        trace.close_forward()
        loss.backward()
        return trace.end()
    except BaseException:
        reshard(model)  # what FSDP gathered for a backward pass that did not run
        raise
    finally:
        trace.stop()


def gradients_of(
    models: Sequence[torch.nn.Module], address: Callable[[torch.UntypedStorage], int]
) -> tuple[tuple[str, int], ...]:
    """Returns the names of parameters that have gradients, and where these are.

    Args:
        models: the models.
        address: returns that of a storage.
    """
    parameters = [(name, each) for name, each in named_tensors(models) if isinstance(each, torch.nn.Parameter)]
    gradients = ((name, gradient_of(parameter)) for name, parameter in parameters)
    plain = ((name, each) for name, each in gradients if each is not None and has_plain_storage(each))
    return tuple((name, address(storage_of(each))) for name, each in plain)


def is_profiling() -> bool:
    """Whether a profiler of the user's is running."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
