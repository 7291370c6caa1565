"""Records a real training step while it runs under an evictor, so that no code of the user runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..ground.errors import ProfileError
from ..ir import Link, Profile
from ..torchtools.accelerators import has_streams
from ..torchtools.memory_trace import CollectorOff
from ..torchtools.operators import operator_facts
from ..torchtools.raw_looks import RawLooks
from ..torchtools.settings import called_as_unwatched
from ..torchtools.tensors import gradient_of, has_plain_storage, storage_of
from ..torchtools.thread_tracer import ThreadTracer, can_trace_threads
from .assembly import assembled_profile
from .device_marks import DeviceMarks
from .hardware import describe_device
from .session import ProfileOptions
from .slots import StepAssembly
from .step import StepRecord, StepRecorder, StepTrace
from .times import never_late, outliers, sibling_kinds, slot_times_ms

if TYPE_CHECKING:
    from ..executor.step import Step

_WeakReference: Any = StorageWeakRef  # which has no types


class _LiveRecorder(StepRecorder):
    """A recorder of a step that trains: it copies ahead of need, and marks ops for the times of a device.

    Attributes:
        has_overlapped: Whether another thread has run an op while one was running.
    """

    def __init__(self, model: torch.nn.Module, step: Step, marks: DeviceMarks | None) -> None:
        super().__init__(model, step)
        self._marks = marks
        self.has_overlapped = False

    def hand_out_all(self) -> None:
        """Note that the program may use whatever it holds at any time from now on."""
        self.note_releases()
        for value in self._value_of.values():
            if self.values[value].released_after is None:
                self.values[value].touches = None

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super()._dispatch(func, args, kwargs)
        self.online.evictor.write_ahead()
        return result

    def _run_overlapping(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it, as the program needs its result. The step has no record."""
        self.has_overlapped = True
        return called_as_unwatched(func, operator_facts(func), args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any, call: int) -> tuple[Any, float]:
        begin = None if self._marks is None else self._marks.now()
        result, elapsed_ms = super()._run(func, args, kwargs, call)
        if self._marks is not None and begin is not None:
            self._marks.ran(call, begin)
        return result, elapsed_ms


class LiveTrace(StepTrace):
    """A training step that is being recorded. All of it is one call of the models.

    Args:
        models: The models.
        step: The step that holds what autograd saves. It must not replay anything, as replays are no ops of the step.
        persistent_bytes: Device bytes that are live before the step.
    """

    def __init__(self, models: Sequence[torch.nn.Module], step: Step, persistent_bytes: int) -> None:
        device = step.evictor.device
        self._marks = DeviceMarks(device) if has_streams(device) else None
        self._live = _LiveRecorder(_as_one(models), step, self._marks)
        super().__init__(models, step, self._live)
        self._persistent_bytes = persistent_bytes
        self._reads = RawLooks(self._live.looked)
        self._gradients: dict[Any, int] = {}
        self._released_bytes = 0

    def open(self, compiled: Callable[[], None] | None = None, *, has_graphs: bool = False) -> None:
        """Begin to record, with hooks and modes in place until `close_forward`."""
        super().open(compiled, has_graphs=has_graphs)
        if isinstance(self._tracer, ThreadTracer):  # which tells of no block that was there before, as others do
            self._gradients = dict(_gradient_storages(self.living_models()))
        recorder, stack = self._live, self._forward
        recorder._enter_model()
        stack.callback(recorder.leave_for_good)
        stack.enter_context(RawLooks(_nothing, self.data_assigned))
        if not has_graphs:  # hooks on all modules would be a part of what is compiled
            stack.enter_context(recorder.path.named())
        stack.enter_context(recorder)

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Also see reads that are no ops, during one call of the model.

        Between the call and the backward pass what the program holds counts as in use: whatever has it may read it in
        any thread, such as one that logs, and steps that follow the plan put all of it back at the end of the call.
        """
        with self._reads:
            yield
        self._live.hand_out_all()

    def close_forward(self) -> None:
        """End the forward pass: take hooks and modes away.

        Many loops release the gradients of the last step only here, between the loss and its backward pass.
        """
        self._reads.leave()
        super().close_forward()
        self._released_bytes += sum(size for gradient, size in self._gradients.items() if gradient.expired())
        self._gradients.clear()
        if self._marks is not None:
            self._marks.turn()

    def _unpack(self, packed: tuple[int | None, object]) -> torch.Tensor:
        begin = None if self._marks is None or self._tracer is None else self._marks.now()
        tensor = super()._unpack(packed)
        if self._marks is not None and begin is not None:
            self._marks.read(begin)
        return tensor

    def stop(self) -> None:
        """Give up. In another thread than the step's, hooks and modes stay, as does a session of torch's profiler."""
        self._reads.leave()
        super().stop()

    def profile(self, link: Link, workload: str) -> Profile:
        """Stop recording after the backward pass, and return the step with memory as if nothing had left the device.

        Raises:
            ProfileError: If the record has gaps.
        """
        if self._marks is not None and self._tracer is not None:
            self._marks.turn()
        if self._live.has_overlapped:
            raise ProfileError("ops of two threads have overlapped")
        collector = CollectorOff()  # it would look through all that is made here, again and again, and find nothing
        try:
            collector.enter()
            return self._profile(self.end(), _as_one(self.living_models()), link, workload)
        except KeyError as error:
            raise ProfileError(f"the record of the step has gaps, such as {error}") from error
        finally:
            collector.leave()

    def _profile(self, record: StepRecord, model: torch.nn.Module, link: Link, workload: str) -> Profile:
        assembly = StepAssembly(record)
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
            self._released_bytes,
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


def _gradient_storages(models: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, int]]:
    """Yield a weak reference to the storage of each gradient, of which several may be views, and its bytes."""
    for gradient in (gradient_of(each) for model in models for each in model.parameters()):
        if gradient is not None and has_plain_storage(gradient):
            storage = storage_of(gradient)
            yield _WeakReference(storage), storage.nbytes()


def _as_one(models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)


def needs_profiler(device: torch.device) -> bool:
    """Whether steps on a device are recorded by torch's profiler, which has one session at a time."""
    return not can_trace_threads(device)
