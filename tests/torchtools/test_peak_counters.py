"""The user's peak counters are what they would be without Pooch, and Pooch's survive the user's resets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.torchtools import accelerators
from pooch.torchtools.peak_counters import PeakCounters, flattened

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Allocator:
    """Counters of one device, as PyTorch's allocator keeps them."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def take(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def stats(self, device: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": self.live, "peak": self.peak}}, "num_ooms": 0}

    def reset(self, device: int) -> None:
        self.peak = self.live


def both() -> tuple[Allocator, PeakCounters, Any]:
    allocator = Allocator()
    module = SimpleNamespace(
        _accelerator_getDeviceStats=allocator.stats, _cuda_memoryStats=allocator.stats,
        _accelerator_resetPeakStats=allocator.reset, _cuda_resetPeakMemoryStats=allocator.reset,
    )  # fmt: skip
    return allocator, PeakCounters(module), module


def users_peak(module: Any) -> int:
    told = {flattened(read(0))["allocated_bytes.all.peak"] for read in (
        module._accelerator_getDeviceStats, module._cuda_memoryStats)}  # fmt: skip
    assert len(told) == 1
    return int(told.pop())


def our_peak(counters: PeakCounters) -> int:
    return flattened(counters.read(0))["allocated_bytes.all.peak"]


def test_each_side_has_its_own_peaks() -> None:
    allocator, counters, module = both()
    allocator.take(100)
    allocator.take(-60)
    counters.reset(0)
    assert (users_peak(module), our_peak(counters)) == (100, 40)
    allocator.take(30)
    allocator.take(-30)
    assert (users_peak(module), our_peak(counters)) == (100, 70)
    module._cuda_resetPeakMemoryStats(0)  # in the middle of what is measured
    assert (users_peak(module), our_peak(counters)) == (40, 70)
    allocator.take(10)
    counters.reset(0)
    assert (users_peak(module), our_peak(counters)) == (50, 50)
    allocator.take(-50)
    module._accelerator_resetPeakStats(0)
    assert (users_peak(module), our_peak(counters)) == (0, 50)


def test_nothing_is_replaced_before_something_is_reset() -> None:
    _, counters, module = both()
    before = dict(vars(module))
    assert our_peak(counters) == 0
    assert dict(vars(module)) == before
    counters.reset(0)
    assert dict(vars(module)) != before


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda", 0), marks=on_a_gpu, id="cuda")])
def test_pytorchs_functions_tell_the_users(device: torch.device) -> None:
    torch.zeros(1, device=device)  # before which there is no allocator
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    block = torch.empty(2**22, dtype=torch.uint8, device=device)
    del block
    accelerators.reset_peaks(device)
    assert accelerators.peak_allocated_bytes(device) == before
    for read in (torch.cuda.max_memory_allocated, torch.accelerator.max_memory_allocated):
        assert read(device) == before + 2**22
    assert torch.cuda.memory_stats(device)["allocated_bytes.all.peak"] == before + 2**22
    block = torch.empty(2**21, dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    del block
    assert torch.cuda.max_memory_allocated(device) == before + 2**21
    torch.cuda.reset_peak_memory_stats(device)
    assert torch.cuda.max_memory_allocated(device) == before
    assert accelerators.peak_allocated_bytes(device) == before + 2**21
