"""Every allocation of a piece of code, from torch's own profiler, with markers and operators on the same clock.

The CPU allocator keeps no counters, but it reports each allocation and each free to the profiler, and so does the CUDA
allocator. One mechanism therefore gives the exact memory curve on both, including workspaces within operators (and
oneDNN's, which it allocates through the same allocator).
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.profiler import ProfilerActivity

from ..ground.errors import ProfileError
from ..ground.live_objects import freeze_known, live_objects, unfreeze
from . import accelerators
from .cpu_allocator.tracing import ThreadTraces, traces_here
from .function_modes import past_subclasses
from .profiler_log import quiet_allocator, quiet_start
from .reported_memory import MemoryEvent, reported_memory
from .requested_sizes import RequestedSizes, as_requested
from .tensors import has_own_memory, inner_tensors, storage_bytes
from .threads import is_alone

MARKER = "pooch:"
AUTOGRAD_NODE = "autograd::engine::evaluate_function: "  # torch's name for the event around each node
LINEAR = "aten::linear"


@dataclass(frozen=True, slots=True)
class Span:
    """A named period of time: a marker of Pooch's or an operator.

    Attributes:
        name: name of the marker or operator.
        start_ns: time of its start.
        end_ns: time of its end.
        node: the autograd node that runs it, "" in the forward pass.
        within: for a marker around the kernel of an operator, the operator that called this one.
    """

    name: str
    start_ns: int
    end_ns: int
    node: str = ""
    within: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """A recorded trace, in order of time.

    Attributes:
        events: allocations and frees on the device.
        markers: periods opened with `marker(name)`, names without their prefix.
        operators: outermost operators that the backward pass ran.
    """

    events: tuple[MemoryEvent, ...]
    markers: tuple[Span, ...]
    operators: tuple[Span, ...]

    @property
    def peak_bytes(self) -> int:
        """Highest number of live bytes above the start."""
        live = peak = 0
        for event in self.events:
            live += event.size_bytes
            peak = max(peak, live)
        return peak


def marker(name: str) -> AbstractContextManager[object]:
    """Context manager that records a named period in the traces of the thread."""
    traces = traces_here()
    if traces is None:
        return record_function(MARKER + name)
    return _marked_twice(traces, name) if MemoryTracer.running else traces.marked(name)


@contextmanager
def _marked_twice(traces: ThreadTraces, name: str) -> Iterator[None]:
    """Also for a session of torch's profiler, which may be that of another thread."""
    with record_function(MARKER + name), traces.marked(name):
        yield


class MemoryTracer:
    """Records a `MemoryTrace` of a device between `start` and `stop`, with torch's profiler.

    Attributes:
        running: number of those that record.
    """

    running: ClassVar[int] = 0

    def __init__(self, device: torch.device) -> None:
        self._device, self._quiet, self._sizes = device, quiet_allocator(), RequestedSizes(device)
        # Without acc_events, since torch would then build its own table of events, which takes longer than the step.
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Starts recording.

        Raises:
            ProfileError: if torch's profiler would hear of no memory.
        """
        if why := accelerators.why_unheard(self._device):
            raise ProfileError(why)
        self._quiet.__enter__()
        self._sizes.begin()
        with quiet_start(), warnings.catch_warnings():
            # PyTorch 2.11 and 2.12 say so of every session
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profiler.__enter__()
        MemoryTracer.running += 1

    def stop(self) -> MemoryTrace:
        """Stops recording and returns the trace."""
        accelerators.synchronize(self._device)
        MemoryTracer.running -= 1
        try:
            self._profiler.__exit__(None, None, None)
        finally:
            self._quiet.__exit__(None, None, None)
            requested = self._sizes.end()
        trace = read_trace(self._profiler.profiler.kineto_results, self._device)  # type: ignore[union-attr]
        return replace(trace, events=as_requested(trace.events, requested)) if requested else trace


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Context manager without cyclic garbage collection, which would free tensors at varying times."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CollectorOff:
    """Switches cyclic garbage collection off as long as any of these says so."""

    _users: set[int] = set()  # noqa: RUF012  (of the process, like the collector)
    _was_enabled = False
    _lock = threading.RLock()  # a finalizer may leave it while it is entered

    def enter(self) -> None:
        """Switch it off. `leave` follows, also where this was interrupted."""
        cls = CollectorOff
        with cls._lock:
            if not cls._users:
                cls._was_enabled = gc.isenabled()
            cls._users.add(id(self))
            gc.disable()

    def leave(self) -> None:
        """Switch it on again, if this was the last to have it off. May be repeated."""
        cls = CollectorOff
        with cls._lock:
            if cls._users == {id(self)} and cls._was_enabled:
                gc.enable()
            cls._users.discard(id(self))

    @classmethod
    def by_program(cls) -> bool:
        """Whether it is off because the program wants that."""
        with cls._lock:
            return not (cls._was_enabled if cls._users else gc.isenabled())


@contextmanager
def earlier_objects_exempt() -> Iterator[None]:
    """Context manager in which garbage collections examine only objects that were created inside.

    A full collection walks every object of the process. With large libraries loaded, this can take longer than a step.
    """
    if gc.get_freeze_count():  # the program has frozen objects itself, and they must remain frozen
        yield
        return
    freeze_known()
    try:
        yield
    finally:
        unfreeze()


def read_trace(results: Any, device: torch.device) -> MemoryTrace:
    """Reads the trace from the results of a profiler session (`kineto_results`).

    Raises:
        ProfileError: if the parts of the results do not agree.
    """
    tree = _read_tree(results.experimental_event_tree(), device)
    return replace(tree, events=reported_memory(results, device, tree.events))


def _read_tree(roots: list[Any], device: torch.device) -> MemoryTrace:
    """Reads the profiler's tree, which has only those events of a GPU's memory that happened within an op."""
    from torch._C._profiler import _EventType

    events: list[MemoryEvent] = []
    markers: list[Span] = []
    operators: list[Span] = []
    stack: list[tuple[Any, str, bool, tuple[str, str]]]
    stack = [(root, "", False, ("", "")) for root in reversed(roots)]
    while stack:
        event, node, inside_operator, around = stack.pop()
        name = event.name
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            here = device.index is None or fields.device.index in (device.index, -1, None)
            if fields.device.type == device.type and here:
                events.append(MemoryEvent(event.start_time_ns, fields.ptr or 0, fields.alloc_size))
        elif event.tag == _EventType.TorchOp:
            span = Span(name, event.start_time_ns, event.end_time_ns, node)
            if name.startswith(MARKER):
                markers.append(replace(span, name=name[len(MARKER) :], within=around[0]))
                inside_operator = inside_operator or bool(node)  # Pooch's own work in the backward pass is no op of it
            elif name.startswith(AUTOGRAD_NODE):
                node = name[len(AUTOGRAD_NODE) :]
            elif node and not inside_operator and "::" in name and not name.startswith("torch::autograd"):
                operators.append(span)
                inside_operator = True
            if "::" in name:  # else it is the name of a call of a dispatch mode
                around = (around[1], name)
        stack.extend((child, node, inside_operator, around) for child in reversed(event.children))
    markers.sort(key=lambda span: span.start_ns)
    operators.sort(key=lambda span: span.start_ns)
    return MemoryTrace(tuple(events), tuple(markers), tuple(operators))


@past_subclasses
def live_bytes(device: torch.device) -> int:
    """Returns the device bytes of all live tensors: from the allocator on a GPU, from Python's objects on the CPU."""
    if accelerators.has_streams(device):
        accelerators.refuse_uncounted(device)
        return accelerators.allocated_bytes(device)
    return storage_bytes(live_tensors())


@past_subclasses
def live_tensors(device_type: str = "cpu", generations: Sequence[int | None] = (None,)) -> list[torch.Tensor]:
    """Returns all tensors on a kind of device that the interpreter tracks; in place of sparse ones, their parts.

    Args:
        device_type: the kind of device.
        generations: those to look through (`ground.live_objects`). None: all of them.
    """
    found: list[torch.Tensor] = []
    reads_gradients = is_alone()
    for candidate in live_objects(torch.Tensor, generations):
        if _has_memory(type(candidate)) and candidate.device.type == device_type and not _is_wrapped(candidate):
            found.append(candidate)
            # Another thread may be training with it, and PyTorch ends the process if its gradient is read then.
            if reads_gradients and _is_leaf(candidate) and candidate.grad is not None:
                found.append(candidate.grad)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        without = [each for each in found if not has_own_memory(each) and each.layout in _SPARSE]
        parts = [part for each in without for part in inner_tensors(each) or ()]
    return [each for each in chain(found, parts) if has_own_memory(each)]


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a leaf. Of a view from `no_grad` with a changed base, PyTorch does not say."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor stands for another one, by `torch.vmap` and the like: it has no memory.

    AOTAutograd may leave functional ones behind, depending on when the garbage collector ran, and their storages raise.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)


def _has_memory(kind: type) -> bool:
    """Returns whether tensors of a type have memory.

    torch.export leaves fake tensors behind, which name a device but have no memory there and may have no size. A
    parameter of a lazy module has none yet either, and refuses nearly everything.
    """
    without = (FakeTensor, UninitializedParameter, UninitializedBuffer)
    return not issubclass(kind, without)
