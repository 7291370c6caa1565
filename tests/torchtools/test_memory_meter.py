"""What a peak counts: allocated, requested and reserved bytes are told apart."""

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
    assert meter.peak_bytes == meter.requested_bytes >= 1001
    assert meter.reserved_bytes is None


def test_a_caching_allocator_counts_all_three(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"requested": 11 * MIB + 5, "allocated": 12 * MIB, "reserved": 20 * MIB}
    asked_for: list[str] = []
    monkeypatch.setattr(accelerators, "has_streams", lambda device: True)
    monkeypatch.setattr(accelerators, "reset_peaks", lambda device: asked_for.append("reset"))
    monkeypatch.setattr(
        torch.accelerator, "memory_stats", lambda device: {f"{k}_bytes.all.peak": v for k, v in peaks.items()}
    )
    for name in ("allocated", "reserved"):
        monkeypatch.setattr(torch.accelerator, f"max_memory_{name}", lambda device, name=name: peaks[name])
    with MemoryMeter(torch.device("cuda", 0)) as meter:
        asked_for.append("run")
    assert (meter.requested_bytes, meter.peak_bytes, meter.reserved_bytes) == tuple(peaks.values())
    assert asked_for == ["reset", "run"]
