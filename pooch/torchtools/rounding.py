"""What a caching allocator hands out beyond what tensors ask for.

Plans bound allocated bytes as tensors ask for them. PyTorch's CUDA allocator hands out multiples of 512 bytes, and a
large block whole unless more than 1 MiB of it would be left. Which block it takes depends on what its cache holds at
that moment, so no plan can know. A peak that is over a budget by no more than that has another remedy than a tighter
plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pooch.torchtools import accelerators

UNSPLIT_BYTES = 2**20  # most that is left of a large block that is taken whole


def rounding_bytes(device: torch.device) -> int:
    """Bytes of the peak since the counters were last reset that no tensor asked for; 0 without a caching allocator."""
    return rounding_of(accelerators.memory_counters(device)) if accelerators.has_streams(device) else 0


def rounding_of(counters: Mapping[str, int]) -> int:
    """The same from an allocator's counters: the highest allocated bytes less the highest that were asked for.

    No more than granularity explains for as many blocks as there were: what other settings of the allocator add (whole
    powers of two, blocks that are never split) is over the budget like anything else.
    """
    asked_bytes = counters.get("requested_bytes.all.peak", 0)
    if asked_bytes == 0:  # an allocator that does not count them
        return 0
    small, large = (counters.get(f"allocation.{pool}_pool.peak", 0) for pool in ("small", "large"))
    most_bytes = accelerators.GRANULE_BYTES * (small + large) + UNSPLIT_BYTES * large
    return max(0, min(counters.get("allocated_bytes.all.peak", 0) - asked_bytes, most_bytes))
