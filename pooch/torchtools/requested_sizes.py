"""What was requested for each block that a caching allocator handed out, and what it added.

PyTorch's CUDA allocator hands out multiples of 512 bytes, and leaves a large block whole unless more than 1 MiB of it
would remain. Which block it takes depends on its cache at that moment, so no plan can predict it. Plans therefore bound
the bytes that tensors request, and a peak that exceeds a budget only by rounding calls for another remedy than a
tighter plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ..ground.units import round_up
from . import accelerators, cuda_only
from .reported_memory import MemoryEvent

UNSPLIT_BYTES = 2**20  # the largest remainder of a large block that is not split


class RequestedSizes:
    """Records the requests to a device's caching allocator between `begin` and `end`.

    It records nothing on other devices, or if the program itself records the allocator's history.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._watches = device, False

    def begin(self) -> None:
        """Starts recording."""
        if not cuda_only.rounds_up_to_powers(self._device):
            self._watches = cuda_only.begin_history(self._device)

    def end(self) -> dict[int, list[int]]:
        """Stops recording; returns {address: bytes of each request in order, negative for frees}."""
        requested: dict[int, list[int]] = {}
        if self._watches:
            self._watches = False
            for pointer, size_bytes in cuda_only.end_history(self._device):
                requested.setdefault(pointer, []).append(size_bytes)
        return requested


def as_requested(events: Iterable[MemoryEvent], requested: dict[int, list[int]]) -> tuple[MemoryEvent, ...]:
    """Replaces the sizes of blocks by those that were requested, rounded up to the allocator's granularity.

    Addresses at which the requests over the same period do not match the events keep their blocks.
    """
    events = tuple(events)
    at: dict[int, list[MemoryEvent]] = {}
    for event in events:
        at.setdefault(event.pointer, []).append(event)
    agreeing = {pointer: iter(requested[pointer]) for pointer in at if _agree(at[pointer], requested.get(pointer, []))}
    return tuple(_resized(event, agreeing.get(event.pointer)) for event in events)


def _agree(events: list[MemoryEvent], requested: list[int]) -> bool:
    return [event.size_bytes > 0 for event in events] == [size_bytes > 0 for size_bytes in requested]


def _resized(event: MemoryEvent, requested: Iterator[int] | None) -> MemoryEvent:
    if requested is None:
        return event
    size_bytes = without_unsplit_rest(abs(event.size_bytes), abs(next(requested)))
    return replace(event, size_bytes=size_bytes if event.size_bytes > 0 else -size_bytes)


def without_unsplit_rest(block_bytes: int, requested_bytes: int) -> int:
    """Returns what the bytes of a block would be if it had been split.

    What settings of the allocator add on purpose (powers of two, blocks that are never split) counts.
    """
    size_bytes = round_up(requested_bytes, accelerators.GRANULE_BYTES)
    return size_bytes if 0 <= block_bytes - size_bytes <= UNSPLIT_BYTES else block_bytes


def allocated_as_requested(device: torch.device) -> int:
    """Returns the device bytes of all blocks in use, as if each had been split."""
    blocks = None if cuda_only.rounds_up_to_powers(device) else cuda_only.blocks_in_use(device)
    if blocks is None:
        return accelerators.allocated_bytes(device)
    return sum(without_unsplit_rest(block, requested) for block, requested in blocks)


def rounding_bytes(device: torch.device) -> int:
    """Returns the bytes of the peak since `reset_peaks` that no tensor requested; 0 without a caching allocator."""
    return rounding_of(accelerators.memory_counters(device)) if accelerators.has_streams(device) else 0


def rounding_of(counters: Mapping[str, int]) -> int:
    """Returns the same from an allocator's counters: the peak of allocated bytes less the peak of requested bytes.

    It is limited to what granularity can explain for that number of blocks. What other settings of the allocator add
    (powers of two, blocks that are never split) is over the budget like anything else.
    """
    requested_bytes = counters.get("requested_bytes.all.peak", 0)
    if requested_bytes == 0:  # the allocator does not count them
        return 0
    small, large = (counters.get(f"allocation.{pool}_pool.peak", 0) for pool in ("small", "large"))
    most_bytes = accelerators.GRANULE_BYTES * (small + large) + UNSPLIT_BYTES * large
    return max(0, min(counters.get("allocated_bytes.all.peak", 0) - requested_bytes, most_bytes))
