"""Blocks for hypothesis."""

from __future__ import annotations

from hypothesis import strategies

from pooch.packing import Block

any_block = strategies.builds(
    lambda lower, length, size, alignment: Block(lower, lower + length, size, alignment),
    strategies.integers(-20, 20), strategies.integers(1, 20), strategies.integers(0, 50),
    strategies.sampled_from((1, 1, 2, 8, 12)),
)  # fmt: skip
any_blocks = strategies.lists(any_block, max_size=24)
