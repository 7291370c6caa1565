"""What was asked for each block that a caching allocator handed out.

The profiler reports whole blocks. An allocator that does not split a large block counts up to 1 MiB more than was asked
for, as its cache happens to be; what is predicted from such bytes would be as much a matter of chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.reported_memory import MemoryEvent
from pooch.torchtools.rounding import UNSPLIT_BYTES


class RequestedSizes:
    """Watches what is asked of a device's caching allocator between `begin` and `end`; nothing on other devices, nor
    where the program keeps the allocator's history itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._watches = device, False

    def begin(self) -> None:
        """From here on."""
        if not cuda_only.rounds_up_to_powers(self._device):
            self._watches = cuda_only.begin_history(self._device)

    def end(self) -> dict[int, list[int]]:
        """{address: bytes asked for at each allocation (positive) and free (negative) there, in order}."""
        asked: dict[int, list[int]] = {}
        if self._watches:
            self._watches = False
            for pointer, size_bytes in cuda_only.end_history(self._device):
                asked.setdefault(pointer, []).append(size_bytes)
        return asked


def as_requested(events: Iterable[MemoryEvent], asked: dict[int, list[int]]) -> tuple[MemoryEvent, ...]:
    """The events with what was asked for, in multiples of the allocator's granularity, in the place of whole blocks.

    Args:
        events: in order of time.
        asked: of the same stretch of time. Addresses at which it does not agree with the events keep their blocks.
    """
    events = tuple(events)
    at: dict[int, list[MemoryEvent]] = {}
    for event in events:
        at.setdefault(event.pointer, []).append(event)
    agreeing = {pointer: iter(asked[pointer]) for pointer in at if _agree(at[pointer], asked.get(pointer, []))}
    return tuple(_resized(event, agreeing.get(event.pointer)) for event in events)


def _agree(events: list[MemoryEvent], asked: list[int]) -> bool:
    return [event.size_bytes > 0 for event in events] == [size_bytes > 0 for size_bytes in asked]


def _resized(event: MemoryEvent, asked: Iterator[int] | None) -> MemoryEvent:
    if asked is None:
        return event
    size_bytes = without_unsplit_rest(abs(event.size_bytes), abs(next(asked)))
    return replace(event, size_bytes=size_bytes if event.size_bytes > 0 else -size_bytes)


def without_unsplit_rest(block_bytes: int, asked_bytes: int) -> int:
    """Bytes of a block, had it been split where it could be.

    What settings of the allocator add by intent (whole powers of two, blocks that are never split) counts.
    """
    size_bytes = -(-asked_bytes // accelerators.GRANULE_BYTES) * accelerators.GRANULE_BYTES
    return size_bytes if 0 <= block_bytes - size_bytes <= UNSPLIT_BYTES else block_bytes


def allocated_as_requested(device: torch.device) -> int:
    """Device bytes of all blocks that are in use now, had each been split where it could be."""
    blocks = None if cuda_only.rounds_up_to_powers(device) else cuda_only.blocks_in_use(device)
    if blocks is None:
        return accelerators.allocated_bytes(device)
    return sum(without_unsplit_rest(block, asked) for block, asked in blocks)
