"""Records a real training step while it runs under an evictor, so that no code of the user runs twice.

A profile needs to know when the program itself releases each value. The ordinary session finds out with a second
forward pass in which autograd keeps nothing. Here the evictor's records hold what autograd saved, so the storage's
reference count tells: as soon as nothing but the record holds it, the program has released it.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ProfileError
from ..ir import Link, Profile
from ..torchtools.accelerators import has_streams
from ..torchtools.effects import written_tensors
from ..torchtools.memory_trace import CollectorOff, MemoryTrace, MemoryTracer, marker
from ..torchtools.mode_stacks import LooseStack, Undoing
from ..torchtools.operators import operator_facts
from ..torchtools.other_profilers import told_of_profilers
from ..torchtools.raw_looks import RawLooks
from ..torchtools.standing_aside import StepHooks
from ..torchtools.tensors import has_plain_storage, storage_key, storage_of
from ..torchtools.thread_tracer import ThreadTracer, can_trace_threads, started_tracer
from ..torchtools.threads import OwnThread
from .absences import without_absences
from .assembly import assembled_profile
from .device_marks import DeviceMarks
from .hardware import describe_device
from .recorder import ForwardRecorder
from .session import ProfileOptions
from .slots import StepAssembly
from .step import StepRecord, Unpack
from .times import never_late, outliers, sibling_kinds, slot_times_ms

if TYPE_CHECKING:
    from ..executor.online import OnlineStep
    from ..executor.online.record import OnlineRecord


class _LiveRecorder(ForwardRecorder):
    """A recorder that also finds when the program releases what autograd has saved."""

    def __init__(self, model: torch.nn.Module, step: OnlineStep, marks: DeviceMarks | None) -> None:
        super().__init__(model)
        self._marks = marks
        self.released: dict[int, int] = {}
        self._online: OnlineStep = weakref.proxy(step)  # the recorder waits for the collector, the step's tier must not
        self._held: dict[int, Any] = {}  # records of saved values that the program still holds

    def saved(self, value: int, record: Any) -> None:
        """Watch for the program's release of a saved value."""
        self._held[value] = record

    def hand_out_all(self) -> None:
        """Note that the program may use whatever it holds at any time from now on."""
        self.note_releases()
        for value in self._value_of.values():
            if value not in self.released:
                self.values[value].touches = None

    def note_releases(self) -> None:
        """Find values that the program has released since the last op."""
        for value, record in list(self._held.items()):
            if not record.is_held_elsewhere:
                del self._held[value]
                self.released.setdefault(value, len(self.ops) - 1)

    def storage_gone(self, key: int) -> None:
        value = self._value_of.get(key)
        if value is not None:
            self.released.setdefault(value, len(self.ops) - 1)
        super().storage_gone(key)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.note_releases()
        facts = operator_facts(func)
        if facts.written or facts.written_names:
            for key in written_tensors(facts, args, kwargs):
                self._online.overwritten(self._value_of.get(key))
        self._online.evictor.look_before((args, kwargs))
        result = super()._dispatch(func, args, kwargs)
        self._online.evictor.write_ahead()
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, call: int) -> tuple[Any, float]:
        before_ms = self._online.evictor.stall_ms
        begin = None if self._marks is None else self._marks.now()
        result, elapsed_ms = super()._run(func, args, kwargs, call)
        if self._marks is not None and begin is not None:
            self._marks.ran(call, begin)
        return result, max(0.0, elapsed_ms - (self._online.evictor.stall_ms - before_ms))


@dataclass(frozen=True, slots=True)
class _Released:
    """What `StepAssembly` needs to know of the pass in which autograd keeps nothing."""

    released_after: int | None


@dataclass(frozen=True, slots=True)
class _ReleasedPass:
    values: list[_Released]


class LiveTrace:
    """One step that is recorded while it trains. Its forward pass lies between `open` and `close_forward`.

    While it is open the collector is off. It does not keep the models alive. Several threads may record a step each.
    Where torch's profiler has to record (see `needs_profiler`), one may, and a profiler of the user's ends it.

    Args:
        models: The models.
        step: The step that holds what autograd saves. It must not replay anything, as replays are no ops of the step.
        persistent_bytes: Device bytes that are live before the step.
    """

    def __init__(self, models: Sequence[torch.nn.Module], step: OnlineStep, persistent_bytes: int) -> None:
        self._models, self._step, self._persistent_bytes = [*map(weakref.ref, models)], step, persistent_bytes
        self._device = step.evictor.device
        self._marks = DeviceMarks(self._device) if has_streams(self._device) else None
        self._recorder = _LiveRecorder(_as_one(models), step, self._marks)
        self._tracer: MemoryTracer | ThreadTracer | None = None
        self._unpacks: list[Unpack] = []
        self._forward = LooseStack()
        self._session = Undoing()
        self._reads = RawLooks(self._recorder.looked)
        self._others: dict[OnlineRecord, int] = {}
        self._thread = OwnThread()
        self._is_whole = True

    def open(self) -> None:
        """Begin to record, with hooks and modes in place until `close_forward`."""
        session = self._session
        collector = CollectorOff()
        session.add(collector.leave)
        collector.enter()  # it would free tensors at varying times
        session.add(partial(setattr, self._step.evictor, "on_move", None))
        self._step.evictor.on_move = self._moved
        self._tracer = started_tracer(self._device)
        if isinstance(self._tracer, MemoryTracer):
            atexit.register(self.stop)  # an interpreter that ends with a session open crashes
            session.add(partial(atexit.unregister, self.stop))
            told = told_of_profilers(self._give_way)
            told.__enter__()
            session.add(partial(told.__exit__, None, None, None))
        recorder, stack = self._recorder, self._forward
        recorder._enter_model()
        stack.callback(recorder.leave_for_good)
        stack.enter_context(StepHooks(self._pack, self._unpack, self._step.fell_silent))
        stack.enter_context(RawLooks(_nothing, self._data_assigned))
        stack.enter_context(recorder.path.named())
        stack.enter_context(recorder)

    def _moved(self, kind: str, record: OnlineRecord, pointer: int) -> None:
        """Mark what the evictor does. Values of other steps that are alive get numbers that no value has.

        What another thread has it do is not on record, unless torch's profiler follows it there, as into the thread
        in which autograd runs the backward pass of a device.
        """
        if not self._thread.is_here and not (isinstance(self._tracer, MemoryTracer) and is_profiling()):
            self._is_whole = False
            return
        value = (
            record.value if record.owner() is self._step else -self._others.setdefault(record, 1 + len(self._others))
        )
        with torch._C._DisableTorchDispatch(), marker(f"{kind} {value} {pointer} {record.size_bytes}"):
            pass  # no call of the step, though an allocation between two calls may have asked for room

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

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Also see reads that are no ops, during one call of the model.

        Between the call and the backward pass what the program holds counts as in use: whatever has it may read it in
        any thread, such as one that logs, and steps that follow the plan put all of it back at the end of the call.
        """
        with self._reads:
            yield
        self._recorder.hand_out_all()

    def close_forward(self) -> None:
        """End the forward pass: take hooks and modes away."""
        self._recorder.note_releases()
        self._reads.leave()
        self._forward.close()
        self._recorder.end_forward(self._living_models())
        if self._marks is not None:
            self._marks.turn()

    def _data_assigned(self, tensor: torch.Tensor) -> None:
        """Note that the program is about to give a tensor other data."""
        if has_plain_storage(tensor):
            self._step.reassigned.note(tensor, self._recorder._value_of.get(storage_key(tensor)))

    def _living_models(self) -> list[torch.nn.Module]:
        return [model for model in (reference() for reference in self._models) if model is not None]

    def _pack(self, tensor: torch.Tensor) -> tuple[int | None, object]:
        recorder = self._recorder
        value = recorder.note_saved(tensor)
        if value is None:
            return None, self._step.keep_silent(tensor)
        if recorder.values[value].role != "made":
            return value, tensor
        with torch._C._DisableTorchDispatch(), recorder.unwatched():
            handle = self._step.hold(tensor, value, self)
            recorder.saved(value, handle.record)
            return value, handle

    def _unpack(self, packed: tuple[int | None, object]) -> torch.Tensor:
        value, kept = packed
        if self._tracer is None:  # a later backward pass through the same graph
            return self._step.unpack(kept)
        begin = None if self._marks is None else self._marks.now()
        with marker(f"unpack {len(self._unpacks)}"):
            tensor = self._step.unpack(kept)
        if self._marks is not None and begin is not None:
            self._marks.read(begin)
        pointer = storage_of(tensor).data_ptr() if has_plain_storage(tensor) else 0
        self._unpacks.append(Unpack(-1 if value is None else value, pointer, self._recorder.units_there()))
        return tensor

    def stop(self) -> None:
        """Give up. In another thread than the step's, hooks and modes stay, as does a session of torch's profiler."""
        self._reads.leave()
        self._forward.close()
        if self._thread.is_here or not isinstance(self._tracer, MemoryTracer):
            self._end_session()

    def profile(self, link: Link, workload: str) -> Profile:
        """Stop recording after the backward pass, and return the step with memory as if nothing had left the device.

        Raises:
            ProfileError: If the record has gaps.
        """
        if self._tracer is not None:
            if self._marks is not None:
                self._marks.turn()
            with marker("end"):
                pass
        self._forward.close()
        trace = self._end_session()
        models = self._living_models()
        if trace is None or not self._is_whole or len(models) < len(self._models):
            raise ProfileError("the step was not recorded to its end")
        try:
            return self._profile(self._record(trace), _as_one(models), link, workload)
        except KeyError as error:
            raise ProfileError(f"the record of the step has gaps, such as {error}") from error

    def _record(self, trace: MemoryTrace) -> StepRecord:
        values = self._recorder.values
        trace = without_absences(trace, values)
        unpacks = (
            replace(each, pointer=values[each.value].pointer) if each.value >= 0 else each for each in self._unpacks
        )
        return StepRecord(self._recorder, tuple(unpacks), trace)

    def _profile(self, record: StepRecord, model: torch.nn.Module, link: Link, workload: str) -> Profile:
        recorder = self._recorder
        released = _ReleasedPass([_Released(recorder.released.get(value.id)) for value in recorder.values])
        assembly = StepAssembly(record, released)  # type: ignore[arg-type]
        launching_ms = slot_times_ms(assembly)
        on_device_ms = None if self._marks is None else self._marks.slot_times_ms(assembly, launching_ms)
        times_ms = launching_ms if on_device_ms is None else on_device_ms
        for slot, median_ms in outliers(sibling_kinds(assembly), times_ms).items():
            times_ms[slot] = median_ms  # most likely it waited for a copy
        profile = assembled_profile(
            assembly,
            model,
            ProfileOptions(workload=workload),
            times_ms,
            self._persistent_bytes,
            mode="offload",
            device=describe_device(self._device),
            link=link,
            step_ms=sum(times_ms),
            time_factor=1.0,
            reserved_bytes=0,
            notes=("recorded from a training step under the online policy; the in-core time is the sum of op times",),
            sizes="requested" if self._device.type == "cpu" else "allocated",
        )
        if on_device_ms is None:
            return profile
        host_ms = never_late(launching_ms, times_ms)
        return replace(profile, ops=tuple(replace(op, host_ms=ms) for op, ms in zip(profile.ops, host_ms, strict=True)))


def _nothing(arguments: Any, handed_out: bool) -> None:
    """Reads between the calls count as reads of all that the program holds."""


def _as_one(models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)


def needs_profiler(device: torch.device) -> bool:
    """Whether steps on a device are recorded by torch's profiler, which has one session at a time."""
    return not can_trace_threads(device)


def is_profiling() -> bool:
    """Whether a profiler of the user's is running."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
