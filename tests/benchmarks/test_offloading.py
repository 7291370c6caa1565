"""Offloading, the peer: what it keeps off the device is counted where it comes back."""

from __future__ import annotations

import pytest
import torch

from benchmarks.offloading import saved_tensors_offloaded
from tests.counting import counting

pytestmark = pytest.mark.cpu


def test_what_comes_back_is_counted_by_an_installed_allocator() -> None:
    """Offloading is a peer that is measured: its peak must hold the bytes that it copies in."""
    with counting() as allocator:
        pixels = torch.rand(2**20, requires_grad=True)
        with saved_tensors_offloaded(torch.nn.Module()):
            loss = pixels.exp().sum()
        before_bytes = allocator.live_bytes()
        allocator.reset_peak()
        loss.backward()  # of `exp`: the gradient of `sum` takes no memory, its result comes back, their product is new
        assert allocator.peak_bytes() - before_bytes >= 2 * pixels.nbytes
