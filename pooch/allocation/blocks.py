"""Recorded steps as blocks to pack. Time is the number of the request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..ground.units import round_up
from ..packing import Block
from ..torchtools.cpu_allocator import ALIVE, ArenaFunctions, RecordedStep


def common_step(first: RecordedStep, second: RecordedStep) -> RecordedStep | None:
    """Return a step in which every block lives as long as in either, or None if the two ask for different sizes.

    The garbage collector and other threads free some blocks now earlier, now later.
    """
    if not np.array_equal(first.sizes, second.sizes):
        return None
    outlives = (first.deaths == ALIVE) | (second.deaths == ALIVE)
    return RecordedStep(first.sizes, np.where(outlives, ALIVE, np.maximum(first.deaths, second.deaths)))


def calls_that_repeat(
    recorded: RecordedStep, begins: Sequence[int], most: int, least_calls: int = 0, *, by_sizes: bool = False
) -> int:
    """Return after how many calls the requests repeat, or 0 if it is not known that they do.

    Args:
        recorded: all requests of the calls, in order.
        begins: the number of the first request of each call, and of that after the last.
        most: calls of a step.
        least_calls: that have to bear it out, so that the calls in the middle of a longer step are not taken for steps
            of their own. At least two steps do.
        by_sizes: whether blocks may outlive one call and not another: where gradients accumulate, those of the first
            call stay, and those of the others do not.
    """
    parts = [part_of(recorded, begin, end) for begin, end in pairwise(begins)]
    calls = [(part.sizes.tobytes(), b"" if by_sizes else (part.deaths == ALIVE).tobytes()) for part in parts]
    for count in range(1, most + 1):
        looked_at = calls[-max(2 * count, least_calls) :]
        if len(looked_at) < max(2 * count, least_calls):
            return 0
        if looked_at[:-count] == looked_at[count:]:
            return count
    return 0


def part_of(step: RecordedStep, begin: int, end: int) -> RecordedStep:
    """Return the requests from `begin` to `end` as a step; what dies after its last request outlives it."""
    deaths = step.deaths[begin:end]
    outlives = (deaths == ALIVE) | (deaths > end)
    return RecordedStep(step.sizes[begin:end], np.where(outlives, ALIVE, deaths - begin))


def blocks_of(
    step: RecordedStep, spare_bytes: int = 0, alignment_bytes: int = ArenaFunctions.alignment_bytes
) -> dict[int, Block]:
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
