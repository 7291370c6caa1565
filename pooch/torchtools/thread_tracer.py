"""Every allocation of a piece of code on the CPU, with markers and operators, without torch's profiler."""

from __future__ import annotations

import torch

from .cpu_allocator.tracing import RawTrace, thread_traces
from .endings import end_with
from .memory_trace import MemoryTrace, MemoryTracer, Span
from .reported_memory import MemoryEvent


class ThreadTracer:
    """Records a `MemoryTrace` of the calling thread on the CPU, as `MemoryTracer` does.

    Any number of threads may record at once, whether or not a profiler runs. A free counts in whatever thread it
    happens, if the block was allocated here. What `UntypedStorage(...)` allocates is not seen. Recording ends with the
    tracer, if nobody stops it.
    """

    def __init__(self) -> None:
        traces = thread_traces()
        assert not isinstance(traces, str)
        self._traces, self._session = traces, traces.new_session()
        self._forget = end_with(self, traces.forget, self._session)

    def start(self) -> bool:
        """Start recording, once. False if another CPU allocator than PyTorch's is in place."""
        return self._traces.begin(self._session)

    def stop(self) -> MemoryTrace:
        """Stop recording, in whatever thread, and return the trace."""
        raw = self._traces.end(self._session)
        self._forget.detach()
        return _trace(raw)


def can_trace_threads(device: torch.device) -> bool:
    """Return whether steps on a device can be recorded without torch's profiler."""
    if device.type != "cpu":
        return False
    traces = thread_traces()
    return not isinstance(traces, str) and traces.can_begin()


def started_tracer(device: torch.device) -> MemoryTracer | ThreadTracer:
    """Return a tracer that records from now on: without torch's profiler where that is possible."""
    if can_trace_threads(device):
        native = ThreadTracer()
        if native.start():
            return native
    tracer = MemoryTracer(device)
    tracer.start()
    return tracer


def _trace(raw: RawTrace) -> MemoryTrace:
    markers: list[Span] = []
    operators: list[Span] = []
    for is_marker, name, start_ns, end_ns, node, within in raw.spans.tolist():
        of_node = raw.names[node] if node >= 0 else ""
        around = raw.names[within] if within >= 0 else ""
        span = Span(raw.names[name], start_ns, end_ns, of_node, around)
        (markers if is_marker else operators).append(span)
    markers.sort(key=lambda span: span.start_ns)
    operators.sort(key=lambda span: span.start_ns)
    events = (MemoryEvent(*row) for row in raw.memory.tolist())
    return MemoryTrace(tuple(events), tuple(markers), tuple(operators))
