"""Predicts what a step under a schedule takes in time and memory, and the blocks that it allocates. No torch."""

from .simulate import simulate, step_time_ms
from .step_blocks import BlockMaker, StepBlock, StepBlocks, step_blocks

__all__ = ["BlockMaker", "StepBlock", "StepBlocks", "simulate", "step_blocks", "step_time_ms"]
