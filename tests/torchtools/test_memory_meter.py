"""What a peak counts: allocated bytes, those of them that were asked for, and reserved bytes are told apart."""

from __future__ import annotations

import pytest
import torch

from pooch.torchtools import accelerators
from pooch.torchtools.memory_meter import MemoryMeter

MIB = 2**20


def test_the_cpu_counts_what_was_asked_for() -> None:
    with MemoryMeter(torch.device("cpu")) as meter:
        one = torch.empty(1001, dtype=torch.uint8)
        del one
    assert meter.peak_bytes >= 1001
    assert meter.rounding_bytes == 0
    assert meter.reserved_bytes is None


def test_a_caching_allocator_counts_all_three(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"requested": 11 * MIB + 5, "allocated": 12 * MIB, "reserved": 20 * MIB}
    calls: list[str] = []
    monkeypatch.setattr(accelerators, "has_streams", lambda device: True)
    monkeypatch.setattr(accelerators, "reset_peaks", lambda device: calls.append("reset"))
    counters = {f"{kind}_bytes.all.peak": peak for kind, peak in peaks.items()} | {"allocation.large_pool.peak": 1}
    monkeypatch.setattr(accelerators, "memory_counters", lambda device: counters)
    with MemoryMeter(torch.device("cuda", 0)) as meter:
        calls.append("run")
    asked_for_bytes = meter.peak_bytes - meter.rounding_bytes
    assert (asked_for_bytes, meter.peak_bytes, meter.reserved_bytes) == tuple(peaks.values())
    assert calls == ["reset", "run"]
