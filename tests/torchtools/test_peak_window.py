"""A window around the program's own code: what it counts, and that nobody else is hurt by it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pooch.torchtools import peak_window
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.peak_window import PeakWindow
from tests.counting import counting, the_allocator

MIB = 2**20
CPU = torch.device("cpu")


class Window(PeakWindow):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.returned: list[bool] = []
        self.interruptions = 0
        super().__init__(self.returned.append, self._count)

    def _count(self) -> None:
        self.interruptions += 1
        self.close()


@pytest.fixture(params=["counted", "traced"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Measured with the counting allocator, and where there is none with torch's profiler."""
    if request.param == "counted":
        the_allocator()  # which fails where it cannot be built
    else:
        monkeypatch.setattr(peak_window, "_counted", lambda: None)
    return str(request.param)


@pytest.fixture
def window() -> Iterator[Window]:
    made = Window()
    assert made.open()
    yield made
    made.close()


def block(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)


def test_the_peak_is_that_of_the_meter() -> None:
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    rows = torch.rand(256, 64)
    layers(rows).sum().backward()
    layers.zero_grad()
    with MemoryMeter(CPU) as meter:
        layers(rows).sum().backward()
    layers.zero_grad()
    window = Window()
    assert window.open()
    layers(rows).sum().backward()
    window.mark()
    assert window.close() == pytest.approx(meter.peak_bytes, abs=1024)
    assert window.returned == [False]


def test_a_profiler_runs_only_where_nothing_else_counts(window: Window, way: str) -> None:
    assert torch._C._autograd._profiler_enabled() is (way == "traced")
    assert the_allocator().is_in_use is (way == "counted")  # so a window knows of other readers


def test_an_allocator_that_somebody_uses_is_left_alone(way: str) -> None:
    with counting() as allocator:
        allocator.reset_peak()
        held = block(4 * MIB)
        del held
        window = Window()
        assert window.open()
        assert torch._C._autograd._profiler_enabled()
        window.close()
        assert allocator.peak_bytes() >= 4 * MIB


def test_what_comes_after_the_last_mark_does_not_count(window: Window) -> None:
    block(MIB)
    window.mark()
    block(4 * MIB)
    assert window.close() == window.start_bytes + MIB


def test_what_lived_at_the_start_and_died_is_taken_off_from_the_next_mark_on() -> None:
    before = block(3 * MIB)
    window = Window()
    assert window.open()
    del before
    window.mark()
    after = block(2 * MIB)
    window.mark()
    assert window.close() == window.start_bytes  # 3 MiB less and 2 MiB more are no peak
    del after


def test_what_an_earlier_window_counted_is_taken_off_once() -> None:
    earlier = Window()
    assert earlier.open()
    before = block(3 * MIB)  # as a loss or an output that the loop holds into the next step
    earlier.close()
    window = Window()
    assert window.open()
    del before
    window.mark()
    after = block(4 * MIB)
    window.mark()
    assert window.close() == window.start_bytes + MIB
    del after


def test_there_is_one_window_at_a_time_in_a_process(window: Window) -> None:
    other = Window()
    assert not other.open()
    window.close()
    assert other.open()
    other.close()


def test_no_window_opens_beside_a_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not Window().open()
    window = Window()
    assert window.open()
    window.close()


def test_a_profiler_that_starts_closes_it_first(window: Window) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        block(16).add(1)
    assert window.interruptions == 1
    assert "aten::add" in [event.name for event in profiler.events()]
    assert window.close() is None


def test_another_thread_cannot_close_it_and_its_backward_passes_do_not_count(window: Window) -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        weight = torch.ones(3, requires_grad=True)
        weight.exp().sum().backward()
        found.append(window.close())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert found == [None]
    assert window.returned == []
    window.mark()
    assert window.close() is not None


def test_a_backward_pass_that_fails_is_told_as_such(window: Window) -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: gradient.view(7))
    with pytest.raises(RuntimeError, match="shape"):
        weight.exp().sum().backward()
    assert window.returned == [True]


def test_who_wraps_the_engine_in_the_meantime_stays(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    calls: list[int] = []

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", theirs)
    window.close()
    assert torch.autograd._engine_run_backward is theirs  # type: ignore[attr-defined]
    weight = torch.ones(3, requires_grad=True)
    weight.exp().sum().backward()
    assert calls == [1]
    assert weight.grad is not None
    assert window.returned == []
    monkeypatch.undo()
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]
