"""Traces of a thread are those of torch's profiler, which any thread may record whatever profilers do."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pooch.profiler.recorder import ForwardRecorder
from pooch.torchtools import endings
from pooch.torchtools.cpu_allocator.tracing import thread_traces, traces_here
from pooch.torchtools.memory_trace import MemoryTrace, MemoryTracer, Span, marker, quiet_collector
from pooch.torchtools.thread_tracer import ThreadTracer, can_trace_threads
from tests.counting import the_allocator
from tests.interrupts import Interrupts
from tests.profiler.test_live import ZOO

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def native() -> None:
    if isinstance(why := thread_traces(), str):
        pytest.skip(why)


def blocks(megabytes: int) -> Tensor:
    return torch.empty(megabytes * MIB, dtype=torch.uint8)


def comparable(trace: MemoryTrace) -> tuple[list[object], list[object], list[object]]:
    """A trace without times and addresses: blocks by the number of their allocation, times by the events before."""
    times = [event.time_ns for event in trace.events]
    assert times == sorted(times)
    living: dict[int, int] = {}
    events: list[object] = []
    for number, event in enumerate(trace.events):
        if event.size_bytes > 0:
            living[event.pointer] = number
        events.append((living[event.pointer], event.size_bytes))

    def of(span: Span) -> object:
        bounds = [bisect_right(times, time_ns) for time_ns in (span.start_ns, span.end_ns)]
        return span.name, span.node, span.within, *bounds

    return events, [of(span) for span in trace.markers], [of(span) for span in trace.operators]


def by_profiler(run: Callable[[], object]) -> MemoryTrace:
    tracer = MemoryTracer(CPU)
    with quiet_collector():
        tracer.start()
        run()
        return tracer.stop()


def by_thread(run: Callable[[], object]) -> MemoryTrace:
    tracer = ThreadTracer()
    with quiet_collector():
        assert tracer.start()
        run()
        return tracer.stop()


class Doubled(torch.autograd.Function):
    """A backward pass with operators, a marker and a nested backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        with marker("in a node"):
            rows.exp()
        with torch.enable_grad():
            inner = rows.detach().requires_grad_()
            (again,) = torch.autograd.grad(inner.sin().sum(), inner)
        return gradients[0] * 2 + 0 * again


def unusual() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Gradients that are summed, checkpoints, functions and a backward pass within the forward pass."""
    model, rows = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.rand(64, 32)

    def forward() -> Tensor:
        hidden = checkpoint(model, rows, use_reentrant=True) + checkpoint(model, rows, use_reentrant=False)
        with torch.autograd.profiler.record_function("the program's"):
            hidden = Doubled.apply(hidden) * hidden  # type: ignore[no-untyped-call]
        torch.autograd.grad(model(rows).sum(), [*model.parameters()])
        return hidden.square().mean()  # type: ignore[no-any-return]

    rows.requires_grad_()
    return model, forward


@pytest.mark.parametrize("kind", [*ZOO, "unusual"])
def test_it_is_the_trace_of_the_profiler(kind: str) -> None:
    torch.manual_seed(0)
    model, forward = {**ZOO, "unusual": unusual}[kind]()

    def step() -> None:
        recorder = ForwardRecorder(model)
        with marker("forward"), recorder if kind != "unusual" else torch.enable_grad():
            loss = forward()
        with marker("backward"):
            loss.backward()
        model.zero_grad()

    step()
    expected, found = by_profiler(step), by_thread(step)
    assert comparable(found) == comparable(expected)
    assert found.peak_bytes == expected.peak_bytes > 0
    assert found.operators
    assert any(span.node for span in found.markers) == (kind == "unusual")


def test_both_may_record_the_same_step_and_markers_reach_both() -> None:
    traces: list[MemoryTrace] = []

    def inner() -> None:
        with marker("within"):
            blocks(1)

    found = by_profiler(lambda: traces.append(by_thread(inner)))
    assert [span.name for span in found.markers] == [span.name for span in traces[0].markers] == ["within"]


def test_sessions_of_one_thread_may_overlap() -> None:
    first, second = ThreadTracer(), ThreadTracer()
    first.start()
    one = blocks(1)
    second.start()
    two = blocks(2)
    one_trace = first.stop()
    del one, two
    two_trace = second.stop()
    assert [event.size_bytes for event in one_trace.events] == [MIB, 2 * MIB]
    assert [event.size_bytes for event in two_trace.events] == [2 * MIB, -2 * MIB]
    assert traces_here() is None


def test_threads_record_at_once_and_each_sees_its_own() -> None:
    barrier, found = threading.Barrier(4), dict[int, MemoryTrace]()

    def work(number: int) -> None:
        tracer = ThreadTracer()
        barrier.wait()
        tracer.start()
        for _ in range(50):
            with marker(f"of {number}"):
                rows = torch.rand(8, number + 1, requires_grad=True)
                rows.exp().sum().backward()
            del rows
        barrier.wait()
        found[number] = tracer.stop()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, trace in found.items():
        assert {span.name for span in trace.markers} == {f"of {number}"}
        assert len(trace.markers) == 50
        assert len(trace.operators) == len(found[0].operators) >= 100
        assert max(event.size_bytes for event in trace.events) == 8 * (number + 1) * 4
        assert sum(event.size_bytes for event in trace.events) == 0


def test_a_free_in_another_thread_counts_and_what_that_allocates_does_not() -> None:
    tracer, held = ThreadTracer(), [blocks(1)]
    tracer.start()
    held.append(blocks(2))

    def work() -> None:
        held.append(blocks(4))
        held.clear()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [event.size_bytes for event in tracer.stop().events] == [2 * MIB, -2 * MIB]


@pytest.mark.parametrize("ends", ["there", "later"])
def test_another_thread_may_end_it(ends: str) -> None:
    tracer, here, stop = ThreadTracer(), threading.Event(), threading.Event()

    def work() -> None:
        tracer.start()
        loss = torch.rand(64, 64, requires_grad=True).exp().sum()
        handle = loss.grad_fn.register_prehook(lambda gradients: (here.set(), stop.wait(), None)[-1])  # type: ignore[union-attr]
        loss.backward()
        handle.remove()

    thread = threading.Thread(target=work)
    thread.start()
    assert here.wait(60)
    if ends == "there":
        trace = tracer.stop()  # in the middle of its backward pass
        stop.set()
        thread.join()
    else:
        stop.set()
        thread.join()
        trace = tracer.stop()
    assert trace.peak_bytes >= 2 * 64 * 64 * 4
    assert bool(trace.operators) == (ends == "later")
    assert by_thread(lambda: blocks(1)).peak_bytes == MIB
    assert not torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_the_programs_profiler_may_begin_and_end_within_it() -> None:
    def run() -> None:
        with torch.profiler.profile() as profiler:
            torch.rand(8, requires_grad=True).exp().sum().backward()
        assert any("exp" in event.key for event in profiler.key_averages())
        assert not any("pooch" in event.key for event in profiler.key_averages())

    trace = by_thread(run)
    assert [span.name for span in trace.operators].count("aten::mul") == 1
    with torch.profiler.profile(profile_memory=True):
        within = by_thread(lambda: blocks(3))
    assert within.peak_bytes == 3 * MIB


def test_a_child_of_a_fork_records_nothing_of_its_parents() -> None:
    tracer = ThreadTracer()
    tracer.start()
    before = blocks(1)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            del before
            torch.rand(8).exp()
            is_quiet = traces_here() is None and not tracer.stop().events
            failed = int(not is_quiet or by_thread(lambda: blocks(2)).peak_bytes != 2 * MIB)
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [event.size_bytes for event in tracer.stop().events] == [MIB]


def test_only_the_cpu_is_traced_so() -> None:
    assert can_trace_threads(CPU)
    assert not can_trace_threads(torch.device("meta"))


def test_a_session_ends_with_its_tracer() -> None:
    tracer = ThreadTracer()
    assert tracer.start()
    assert traces_here() is not None
    del tracer
    assert traces_here() is None
    assert not the_allocator().is_in_use


def test_nothing_is_left_after_an_interrupt_at_any_byte_code() -> None:
    interrupts = Interrupts("torchtools")

    def session() -> None:
        tracer = ThreadTracer()
        assert tracer.start()
        blocks(1)
        assert [event.size_bytes for event in tracer.stop().events] == [MIB, -MIB]

    while interrupts.next(session):
        endings.run_lost()
        assert traces_here() is None, interrupts.place
        assert not the_allocator().is_in_use, interrupts.place
    assert interrupts.count > 100
