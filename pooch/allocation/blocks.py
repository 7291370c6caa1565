"""Recorded steps as blocks to pack. Time is the number of the request."""

from __future__ import annotations

import numpy as np

from ..packing import Block
from ..torchtools.cpu_allocator import ALIVE, RecordedStep
from ..units import round_up

ALIGNMENT_BYTES = 64  # that of PyTorch's own CPU allocator


def common_step(first: RecordedStep, second: RecordedStep) -> RecordedStep | None:
    """Return a step in which every block lives as long as in either, or None if the two ask for different sizes.

    The garbage collector and other threads free some blocks now earlier, now later.
    """
    if not np.array_equal(first.sizes, second.sizes):
        return None
    outlives = (first.deaths == ALIVE) | (second.deaths == ALIVE)
    return RecordedStep(first.sizes, np.where(outlives, ALIVE, np.maximum(first.deaths, second.deaths)))


def blocks_of(step: RecordedStep, spare_bytes: int = 0, alignment_bytes: int = ALIGNMENT_BYTES) -> dict[int, Block]:
    """Return the blocks that live and die in a step, by the number of their request.

    Args:
        step: what was recorded.
        spare_bytes: added to each block, for canaries.
        alignment_bytes: of places and their sizes.
    """
    blocks = {}
    for number, (size, death) in enumerate(zip(step.sizes.tolist(), step.deaths.tolist(), strict=True)):
        if death != ALIVE:
            room_bytes = round_up(size + spare_bytes, alignment_bytes)
            blocks[number] = Block(number, death, room_bytes, alignment_bytes, f"of request {number}")
    return blocks
