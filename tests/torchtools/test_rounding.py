"""How much of a peak is the allocator's rounding: from its counters, within what its granularity explains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pooch.torchtools import accelerators
from pooch.torchtools.requested_sizes import rounding_bytes, rounding_of

MIB = 2**20


def counters(allocated: int, asked: int, small: int = 0, large: int = 0) -> dict[str, Any]:
    return {
        "allocated_bytes.all.peak": allocated,
        "requested_bytes.all.peak": asked,
        "allocation.small_pool.peak": small,
        "allocation.large_pool.peak": large,
    }


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (counters(1024, 700, small=2), 324),
        (counters(12 * MIB, 11 * MIB + 100, large=1), MIB - 100),
        (counters(1024, 1024, small=2), 0),
        (counters(2000, 2048, small=4), 0),
        # THEN what granularity does not explain is none of it: sizes rounded up to powers of two, say
        (counters(64 * MIB, 33 * MIB, large=1), MIB + 512),
        (counters(8192, 10, small=3), 3 * 512),
        # AND an allocator that does not count what was asked for tells nothing
        (counters(64 * MIB, 0, large=100), 0),
        ({}, 0),
    ],
)
def test_rounding_is_what_nobody_asked_for_as_far_as_granularity_explains_it(
    counted: dict[str, Any], expected: int
) -> None:
    assert rounding_of(counted) == expected


def test_a_cpu_rounds_nothing() -> None:
    assert rounding_bytes(torch.device("cpu")) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_block_that_is_not_split_is_counted_as_rounding() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.cuda.empty_cache()
    accelerators.reset_peaks(device)  # those that are told here: the program has its own
    before = rounding_bytes(device)
    asked = 12 * MIB - 700 * 1024  # 2 MiB are what segments are a multiple of, and less than 1 MiB is left
    block = torch.empty(asked, dtype=torch.uint8, device=device)
    assert rounding_bytes(device) - before in (700 * 1024, 0)  # 0: with expandable segments
    assert accelerators.peak_allocated_bytes(device) - rounding_bytes(device) >= block.nbytes
