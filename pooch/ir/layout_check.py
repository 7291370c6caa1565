"""Checks a layout, sharing no code with what makes layouts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ..ground.errors import InvalidLayout
from .layout import Block, Layout, bound_of


def verify(blocks: Sequence[Block], layout: Layout) -> None:
    """Check that no two blocks overlap in time and place, and that all lie aligned within the arena.

    Raises:
        InvalidLayout: names the blocks at fault.
    """
    if len(layout.offsets) != len(blocks):
        raise InvalidLayout(f"{len(blocks)} blocks have {len(layout.offsets)} offsets")
    top = 0
    for index, (block, offset) in enumerate(zip(blocks, layout.offsets, strict=True)):
        if offset < 0 or offset % block.alignment_bytes:
            raise InvalidLayout(f"{_told(blocks, layout, index)} is not aligned to {block.alignment_bytes} bytes")
        top = max(top, offset + block.size_bytes)
    if top != layout.arena_bytes:
        raise InvalidLayout(f"the blocks end at {top} bytes, and the arena at {layout.arena_bytes}")
    if bound_of(blocks) != layout.bound_bytes:
        raise InvalidLayout(f"the bound is {bound_of(blocks)} bytes, not {layout.bound_bytes}")
    _sweep(blocks, layout)


def _sweep(blocks: Sequence[Block], layout: Layout) -> None:
    """Go through time with the live blocks by offset: as long as none overlap, a new one meets its neighbours first."""
    indices = [index for index, block in enumerate(blocks) if block.size_bytes > 0]
    events = [(blocks[index].lower, True, index) for index in indices]
    events += [(blocks[index].upper, False, index) for index in indices]
    live: list[tuple[int, int]] = []
    for _, begins, index in sorted(events):  # lifetimes are half-open: what ends at a time leaves first
        entry = (layout.offsets[index], index)
        if not begins:
            del live[bisect_left(live, entry)]
            continue
        place = bisect_left(live, entry)
        for _, other in live[max(place - 1, 0) : place + 1]:
            low, high = sorted((index, other), key=lambda each: layout.offsets[each])
            if layout.offsets[low] + blocks[low].size_bytes > layout.offsets[high]:
                pair = f"{_told(blocks, layout, low)} and {_told(blocks, layout, high)}"
                raise InvalidLayout(f"{pair} overlap at time {blocks[index].lower}")
        insort(live, entry)


def _told(blocks: Sequence[Block], layout: Layout, index: int) -> str:
    block, offset = blocks[index], layout.offsets[index]
    return f"block {block.name or index} at bytes {offset} to {offset + block.size_bytes}"
