"""The memory trace has every allocation and free, also where torch's event tree has only those inside of ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType

import pooch
from pooch.errors import ProfileError
from pooch.ir import Profile
from pooch.torchtools.memory_trace import MemoryTrace, MemoryTracer, live_bytes, quiet_collector, read_trace
from pooch.torchtools.reported_memory import MemoryEvent

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class RootsAsOnAGpu:
    """Real results of the profiler, but for roots of the tree that are memory events: of a GPU's the profiler keeps
    none.
    """

    lost = 0

    def __init__(self, results: Any) -> None:
        self._results = results

    def experimental_event_tree(self) -> list[Any]:
        roots = self._results.experimental_event_tree()
        kept = [root for root in roots if root.tag != _EventType.Allocation]
        RootsAsOnAGpu.lost += len(roots) - len(kept)
        return kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)


@pytest.fixture
def roots_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> type[RootsAsOnAGpu]:
    real = torch.autograd.profiler._disable_profiler
    monkeypatch.setattr(torch.autograd.profiler, "_disable_profiler", lambda: RootsAsOnAGpu(real()))
    monkeypatch.setattr(RootsAsOnAGpu, "lost", 0)
    return RootsAsOnAGpu


def net_that_lets_outputs_go() -> tuple[nn.Module, Callable[[], Tensor]]:
    """`nn.Sequential` drops each output when it has the next one, between two ops; `abs` saves its input alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Hardtanh(), nn.Linear(4096, 4096), nn.Sigmoid(), nn.Linear(4096, 64))
    rows = torch.rand(64, 64)
    return model, lambda: model(rows).abs().sum()


def traced(run: Callable[[], Any]) -> MemoryTrace:
    tracer = MemoryTracer(CPU)
    with quiet_collector():
        tracer.start()
        run()
        return tracer.stop()


def freed_between_ops() -> None:
    for _ in range(3):
        kept = torch.empty(1 << 20)
        del kept


def test_frees_outside_of_any_op_are_in_the_trace(roots_as_on_a_gpu: type[RootsAsOnAGpu]) -> None:
    trace = traced(freed_between_ops)
    assert roots_as_on_a_gpu.lost >= 3
    assert [event.size_bytes for event in trace.events] == [4 << 20, -4 << 20] * 3
    assert trace.peak_bytes == 4 << 20
    for allocated, freed in pairs(trace.events):
        assert allocated.pointer == freed.pointer != 0
        assert allocated.time_ns < freed.time_ns


def pairs(events: tuple[MemoryEvent, ...]) -> list[tuple[MemoryEvent, MemoryEvent]]:
    return list(zip(events[::2], events[1::2], strict=True))


def shape_of(profile: Profile) -> list[object]:
    """All of a profile that does not depend on the clock."""
    ops = [(op.name, op.entry_bytes, op.peak_bytes) for op in profile.ops]
    return [ops, profile.values, profile.anchors, profile.peak_bytes, profile.persistent_bytes]


@pytest.mark.parametrize("mode", ["run", "offload"])
def test_a_profile_is_the_same_where_the_tree_has_no_roots(
    mode: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pooch.torchtools.thread_tracer.can_trace_threads", lambda device: False)  # as on a GPU
    model, forward = net_that_lets_outputs_go()
    expected = pooch.profile(forward, model, mode=mode)
    lossy = request.getfixturevalue("roots_as_on_a_gpu")
    again = pooch.profile(forward, model, mode=mode)
    assert lossy.lost > 0
    assert shape_of(again) == shape_of(expected)


@dataclass
class Report:
    """A memory event as the profiler lists it."""

    time_ns: int
    size_bytes: int
    device: torch.device

    def name(self) -> str:
        return "[memory]"

    def start_ns(self) -> int:
        return self.time_ns

    def nbytes(self) -> int:
        return self.size_bytes

    def device_type(self) -> Any:
        return getattr(torch._C._autograd.DeviceType, self.device.type.upper())

    def device_index(self) -> int:
        return -1 if self.device.index is None else self.device.index


class Recorded:
    """A session as CUDA leaves it: `events` in the list and in the file, in the tree those inside of an op alone.

    Args:
        events: with the device of each, and whether it happened inside of an op.
        written: how many of them reach the file (None: all).
    """

    BASE_NS = 1_790_857_026_000_000_000

    def __init__(self, events: list[tuple[MemoryEvent, torch.device, bool]], written: int | None = None) -> None:
        self._events, self._in_file = events, events[:written]

    def events(self) -> list[Report]:
        return [Report(e.time_ns, e.size_bytes, device) for e, device, _ in self._events]

    def experimental_event_tree(self) -> list[Any]:
        def node(tag: Any, begin_ns: int, end_ns: int, fields: Any, children: list[Any]) -> Any:
            return SimpleNamespace(
                name="aten::op" if children else "[memory]", tag=tag, start_time_ns=begin_ns, end_time_ns=end_ns,
                extra_fields=fields, children=children,
            )  # fmt: skip

        inside = [(e, device) for e, device, is_inside in self._events if is_inside]
        leaves = [SimpleNamespace(device=device, ptr=e.pointer, alloc_size=e.size_bytes) for e, device in inside]
        memory = [
            node(_EventType.Allocation, e.time_ns, e.time_ns, fields, [])
            for (e, _), fields in zip(inside, leaves, strict=True)
        ]
        return [node(_EventType.TorchOp, 0, 10**19, None, memory)]

    def save(self, path: str) -> None:
        lines = [
            {
                "ph": "i", "name": "[memory]", "ts": "TS",
                "args": {"Addr": e.pointer, "Bytes": e.size_bytes, "Device Type": int(device.type == "cuda"),
                         "Device Id": -1 if device.index is None else device.index},
            }
            for e, device, _ in self._in_file
        ]  # fmt: skip
        text = json.dumps({"baseTimeNanoseconds": self.BASE_NS, "traceEvents": [{"ph": "X", "args": {}}, *lines]})
        for event, _, _ in self._in_file:  # the profiler writes microseconds with all of their nanoseconds
            since_ns = event.time_ns - self.BASE_NS
            text = text.replace('"TS"', f"{since_ns // 1000}.{since_ns % 1000:03d}", 1)
        Path(path).write_text(text)


def as_cuda_reports() -> list[tuple[MemoryEvent, torch.device, bool]]:
    """Two outputs, the first of which leaves between two ops in the very nanosecond in which memory of the host and of
    another card comes; and a gradient that leaves between two nodes.
    """
    begin = Recorded.BASE_NS + 4_456_583_765_929_327
    return [
        (MemoryEvent(begin, 0x7000, 1024), CUDA, True),
        (MemoryEvent(begin + 1, 0x8000, 2048), CUDA, True),
        (MemoryEvent(begin + 2, 0x7000, -1024), CUDA, False),
        (MemoryEvent(begin + 2, 0x5555, 64), CPU, True),
        (MemoryEvent(begin + 2, 0x7000, 512), torch.device("cuda", 1), True),
        (MemoryEvent(begin + 3, 0x7000, 1024), CUDA, True),
        (MemoryEvent(begin + 4, 0x7000, -1024), CUDA, False),
        (MemoryEvent(begin + 5, 0x8000, -2048), CUDA, True),
    ]


def test_events_of_a_gpu_have_their_addresses_inside_and_outside_of_ops() -> None:
    reports = as_cuda_reports()
    trace = read_trace(Recorded(reports), CUDA)
    assert list(trace.events) == [event for event, device, _ in reports if device == CUDA]
    assert trace.peak_bytes == 3072
    assert read_trace(Recorded(reports), torch.device("cuda")).peak_bytes == 3584  # no index: all cards
    assert [event.size_bytes for event in read_trace(Recorded(reports), CPU).events] == [64]


def test_a_trace_file_that_lacks_events_is_refused_and_not_believed() -> None:
    with pytest.raises(ProfileError, match="lists 6 allocations and frees, and names the addresses of 5"):
        read_trace(Recorded(as_cuda_reports(), written=-1), CUDA)


def test_a_trace_that_cannot_be_written_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(self: Recorded, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "i"')

    monkeypatch.setattr(Recorded, "save", cut_short)
    with pytest.raises(ProfileError, match="set TMPDIR to a directory with room"):
        read_trace(Recorded(as_cuda_reports()), CUDA)


def test_parameters_without_a_shape_yet_are_no_bytes() -> None:
    held = torch.ones(1000)
    before = live_bytes(torch.device("cpu"))
    lazy = torch.nn.LazyLinear(4)
    assert live_bytes(torch.device("cpu")) == before >= held.nbytes
    lazy(torch.ones(1, 5))
    assert live_bytes(torch.device("cpu")) > before
