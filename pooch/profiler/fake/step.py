"""Records a step in a fake world: the passes of a real step, observing storages instead of an allocator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...ground.errors import ProfileError
from ...torchtools.memory_trace import LINEAR, quiet_collector
from ...torchtools.raw_looks import RawLooks
from ...torchtools.stand_ins import Place, StandIns
from ...torchtools.standing_aside import StepHooks
from ...torchtools.tensors import has_plain_storage, map_tensors
from ..recorder import ForwardRecorder
from ..step import RUNS_BACKWARD, Forward, StepRecord, Unpack, check_loss, gradients_of
from .backward import BackwardRecorder
from .contents import READ_BACK
from .costs import OpCosts
from .kernels import distinct_results
from .trace import FakeTrace
from .world import FakeWorld


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A recorded step, and the cost in ms of each backward operator by its start time."""

    record: StepRecord
    backward_times_ms: dict[int, float]


class FakeForwardRecorder(ForwardRecorder):
    """Records forward ops of a fake world: looks costs up, and traces memory by the lifetimes of storages."""

    def __init__(self, model: torch.nn.Module, world: FakeWorld, trace: FakeTrace, costs: OpCosts) -> None:
        super().__init__(model)
        self._world, self._trace, self._costs = world, trace, costs
        self.within = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks a fake tensor for its device; plain training runs no operator for that
            return func(*args, **(kwargs or {}))
        if func is READ_BACK:
            self.looked(map_tensors(self._world.as_fake, args), handed_out=False)
            return func(*args)
        args, kwargs = map_tensors(self._world.as_fake, args), map_tensors(self._world.as_fake, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any, call: int) -> tuple[Any, float]:
        with self._trace.marked(f"op {call}", self.within):
            result = self._costs.corrected(func, args, kwargs, distinct_results(func(*args, **kwargs)))
            cost = self._costs.cost(func, args, kwargs, result)
            self._trace.results(args, kwargs, result)
            self._trace.passing(cost.workspace_bytes)
        return result, cost.time_ms

    def _address(self, storage: torch.UntypedStorage) -> int:
        return self._trace.address(storage)

    def note_saved(self, tensor: torch.Tensor) -> int | None:
        """As for real tensors; a real tensor is replaced by its fake."""
        return super().note_saved(self._world.as_fake(tensor))


class _Linear:
    """Stands in for `F.linear`, and tells the recorder of the thread about calls of it."""

    def __init__(self, original: Any) -> None:
        self.__wrapped__ = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder: FakeForwardRecorder | None = getattr(_RECORDING, "recorder", None)
        if recorder is None:
            return self.__wrapped__(*args, **kwargs)
        before, recorder.within = recorder.within, LINEAR
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            recorder.within = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)


_RECORDING = threading.local()
_LINEAR_CALLS = StandIns(Place(torch.nn.functional, "linear", _Linear))


@contextmanager
def linear_calls(recorder: FakeForwardRecorder) -> Iterator[None]:
    """Context manager that tells the recorder about calls of `F.linear`, as torch's profiler does for a real step.

    A function mode would have modules leave their fast paths, which they take in plain training.
    """
    _LINEAR_CALLS.use(recorder)
    _RECORDING.recorder = recorder
    try:
        yield
    finally:
        _RECORDING.recorder = None
        _LINEAR_CALLS.leave(recorder)


def record_fake_releases(forward: Forward, model: torch.nn.Module, world: FakeWorld, costs: OpCosts) -> ForwardRecorder:
    """Records a forward pass in which autograd keeps nothing, so that what ends has been released by the program.

    A pack hook drops its argument, and the finalizer of each storage tells. In a world without memory or time a pass
    more costs nothing, and its tensors are not held by records whose references could be counted.
    """
    recorder = FakeForwardRecorder(model, world, FakeTrace(), costs)
    hooks = StepHooks(recorder.note_saved, _no_unpack)
    with quiet_collector(), world.entered():
        with recorder.path.watched(), hooks, RawLooks(recorder.looked), recorder:
            loss = forward()
        recorder.end_forward([model])
        del loss
    return recorder


def _no_unpack(handle: object) -> torch.Tensor:
    raise ProfileError(RUNS_BACKWARD)


def record_fake_step(
    forward: Forward,
    model: torch.nn.Module,
    world: FakeWorld,
    costs: OpCosts,
    granularity_bytes: int = 1,
) -> FakeStep:
    """As `record_step`, in a fake world, on a device whose allocator rounds each allocation up to a multiple of
    `granularity_bytes`.
    """
    trace = FakeTrace(granularity_bytes)
    recorder = FakeForwardRecorder(model, world, trace, costs)
    backward = BackwardRecorder(trace, costs)
    unpacks: list[Unpack] = []

    def pack(tensor: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        return recorder.note_saved(tensor), tensor

    def unpack(handle: tuple[int | None, torch.Tensor]) -> torch.Tensor:
        value, tensor = handle
        with trace.marked(f"unpack {len(unpacks)}"):
            address = trace.address(tensor.untyped_storage()) if has_plain_storage(tensor) else 0
        unpacks.append(Unpack(-1 if value is None else value, address))
        return tensor

    with quiet_collector(), world.entered():
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with hooks, recorder.path.watched(), RawLooks(recorder.looked), linear_calls(recorder), recorder:
            loss = check_loss(forward())
        recorder.note_outliving([model])
        with backward.following(loss):
            loss.backward()
        with trace.marked("end"):
            pass
        gradients = gradients_of([model], trace.address)
        return FakeStep(StepRecord(recorder, tuple(unpacks), trace.finish(), gradients), trace.times_ms)
