"""Times of single ops are the device's own: neither launching nor waiting for the host counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.profiler.fake import measured
from pooch.profiler.fake.measured import run_ms
from pooch.profiler.times import spread_notes

GPU = torch.device("cuda", 0)


class Stream:
    """Does what it is given one after the other; nothing before the host has issued it."""

    def __init__(self) -> None:
        self.host_ms = self.free_ms = 0.0
        self.calls: list[str] = []

    def issue(self, name: str, host_ms: float, device_ms: float) -> None:
        self.calls.append(name)
        self.host_ms += host_ms
        self.free_ms = max(self.free_ms, self.host_ms) + device_ms


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream, self.at_ms = stream, 0.0

    def record(self, stream: Stream) -> None:
        assert stream is self._stream
        stream.issue("event", 0.01, 0.0)
        self.at_ms = stream.free_ms

    def elapsed_time(self, end: Event) -> float:
        assert self._stream.calls[-1] == "synchronize", "an event is asked before it was reached"
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()

    def synchronize(device: Any) -> None:
        made.calls.append("synchronize")
        made.host_ms = max(made.host_ms, made.free_ms) + 0.02

    fakes: dict[str, Any] = {
        "has_streams": lambda device: True,
        "synchronize": synchronize,
        "current_stream": lambda device: made,
        "new_event": lambda device, timed: Event(made) if timed else None,
        "occupy": lambda device, milliseconds: made.issue("busy", 0.01, milliseconds),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(measured, name, fake)
    return made


def test_launching_and_waiting_are_not_counted(stream: Stream) -> None:
    assert run_ms(lambda: stream.issue("op", 0.2, 0.003), GPU) == pytest.approx(0.003)
    assert stream.calls == ["synchronize", "busy", "event", "op", "event", "synchronize"]


def test_an_op_of_many_kernels_takes_the_sum_of_them(stream: Stream) -> None:
    def many() -> None:
        for _ in range(20):
            stream.issue("kernel", 0.01, 0.5)

    assert run_ms(many, GPU) == pytest.approx(10.0)


def test_on_a_cpu_the_clock_is_read_around_the_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    class Result:
        def __init__(self) -> None:
            now_s[0] += 0.25

        def __del__(self) -> None:
            now_s[0] += 1.0

    assert run_ms(Result, torch.device("cpu")) == 250
    assert now_s == [1.25]


def test_the_spread_of_timed_steps_is_told() -> None:
    assert spread_notes([100.0]) == ()
    assert spread_notes([100.0, 120.0]) == ("the 2 timed steps took 100.0 ms to 120.0 ms",)
    (busy,) = spread_notes([300.0, 100.0, 110.0])
    assert busy == "the 3 timed steps took 100.0 ms to 300.0 ms: times vary by 3.0x, so the machine was busy"
