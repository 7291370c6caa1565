"""Every allocation of a stretch of code, from torch's own profiler, with markers and operators on the same clock.

The CPU allocator keeps no counters, but it reports each allocation and each free to the profiler; the
CUDA allocator does the same. So one mechanism gives the exact memory curve on both, workspaces inside of operators
included
(oneDNN's too: it allocates through the same allocator).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from pooch.torchtools import accelerators
from pooch.torchtools.profiler_log import QuietAllocator, quiet_start
from pooch.torchtools.reported_memory import MemoryEvent, reported_memory
from pooch.torchtools.requested_sizes import RequestedSizes, as_requested
from pooch.torchtools.tensors import storage_bytes

MARKER = "pooch:"
AUTOGRAD_NODE = "autograd::engine::evaluate_function: "  # what torch names the event around each node
LINEAR = "aten::linear"
_GRADIENT_SUMS = ("aten::add", "aten::add_")


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time: a marker of ours, or an operator. `node`: the autograd node around it ("" in the
    forward pass), `node_end_ns`: when autograd lets go of what the node saved. `within`: of a marker around
    the kernel of an operator, the operator that called this one.
    """

    name: str
    start_ns: int
    end_ns: int
    node: str = ""
    node_end_ns: int = 0
    within: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """What happened, in order of time.

    Attributes:
        events: allocations and frees on the device.
        markers: stretches opened with `marker(name)`, names without their prefix.
        operators: outermost operators that the backward pass ran.
    """

    events: tuple[MemoryEvent, ...]
    markers: tuple[Span, ...]
    operators: tuple[Span, ...]

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes above the start."""
        live = peak = 0
        for event in self.events:
            live += event.size_bytes
            peak = max(peak, live)
        return peak


def marker(name: str) -> Any:
    """A context manager that leaves a named stretch in the trace."""
    return record_function(MARKER + name)


class MemoryTracer:
    """Records a `MemoryTrace` between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._quiet, self._sizes = device, QuietAllocator(), RequestedSizes(device)
        # Not acc_events: torch would build its own table of events at the end, which costs more than the step.
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Begin to record."""
        self._quiet.begin()
        self._sizes.begin()
        with quiet_start():
            self._profiler.__enter__()

    def stop(self) -> MemoryTrace:
        """End, and read what was recorded."""
        accelerators.synchronize(self._device)
        try:
            self._profiler.__exit__(None, None, None)
        finally:
            self._quiet.end()
            asked = self._sizes.end()
        trace = read_trace(self._profiler.profiler.kineto_results, self._device)  # type: ignore[union-attr]
        return replace(trace, events=as_requested(trace.events, asked)) if asked else trace


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No cyclic garbage collection inside: it would free tensors at moments that differ from run to run."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def earlier_objects_exempt() -> Iterator[None]:
    """Inside, collections look only at objects that were made inside.

    A full collection walks every object of the process; with large libraries loaded this takes longer than many a step.
    """
    if gc.get_freeze_count():  # the program has exempted objects by itself, and they must stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def read_trace(results: Any, device: torch.device) -> MemoryTrace:
    """The trace in a session's results.

    Args:
        results: of torch's profiler (`kineto_results`).
        device: whose memory.

    Raises:
        ProfileError: its parts do not agree.
    """
    tree = _read_tree(results.experimental_event_tree(), device)
    return replace(tree, events=reported_memory(results, device, tree.events))


def _read_tree(roots: list[Any], device: torch.device) -> MemoryTrace:
    """What the profiler's tree has; of a GPU's memory only what happened inside of an op."""
    from torch._C._profiler import _EventType

    events: list[MemoryEvent] = []
    markers: list[Span] = []
    operators: list[Span] = []
    stack: list[tuple[Any, str, int, bool, tuple[str, str]]]
    stack = [(root, "", 0, False, ("", "")) for root in reversed(roots)]
    while stack:
        event, node, node_end_ns, inside_operator, around = stack.pop()
        name = event.name
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            here = device.index is None or fields.device.index in (device.index, -1, None)
            if fields.device.type == device.type and here:
                events.append(MemoryEvent(event.start_time_ns, fields.ptr or 0, fields.alloc_size))
        elif event.tag == _EventType.TorchOp:
            span = Span(name, event.start_time_ns, event.end_time_ns, node, node_end_ns)
            if name.startswith(MARKER):
                markers.append(replace(span, name=name[len(MARKER) :], within=around[0]))
                inside_operator = inside_operator or bool(node)  # what we do within the backward pass is no op of it
            elif name.startswith(AUTOGRAD_NODE):
                node = name[len(AUTOGRAD_NODE) :]
                node_end_ns = _end_of_node(event, node)
            elif node and not inside_operator and "::" in name and not name.startswith("torch::autograd"):
                operators.append(span)
                inside_operator = True
            if "::" in name:  # else what PyTorch names the call of a dispatch mode
                around = (around[1], name)
        stack.extend((child, node, node_end_ns, inside_operator, around) for child in reversed(event.children))
    by_time = _start_of
    return MemoryTrace(
        tuple(events),
        tuple(sorted(markers, key=by_time)),
        tuple(sorted(operators, key=by_time)),
    )


def _end_of_node(event: Any, node: str) -> int:
    """When autograd lets go of what a node saved: after its own work and what brings gradients into shape, before the
    engine adds gradients up.
    """
    own_end_ns = max((child.end_time_ns for child in event.children if child.name == node), default=event.end_time_ns)
    sums = (child for child in event.children if child.name in _GRADIENT_SUMS and child.start_time_ns >= own_end_ns)
    return next((child.start_time_ns - 1 for child in sums), int(event.end_time_ns))


def _start_of(span: Span) -> int:
    return span.start_ns


def live_bytes(device: torch.device) -> int:
    """Device bytes of all tensors that live now: from the allocator on a GPU, from the interpreter's objects on the
    CPU.
    """
    if accelerators.has_streams(device):
        return accelerators.allocated_bytes(device)
    return storage_bytes(live_tensors())


def live_tensors() -> list[torch.Tensor]:
    """Every tensor in the CPU's memory that the interpreter knows of."""
    found: list[torch.Tensor] = []
    for candidate in gc.get_objects():
        kind = type(candidate)
        # torch.export leaves fake tensors behind: they name a device and have no memory there, nor always a size.
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor) and candidate.device.type == "cpu":
            found.append(candidate)
            if candidate.is_leaf and candidate.grad is not None:
                found.append(candidate.grad)
    return found
