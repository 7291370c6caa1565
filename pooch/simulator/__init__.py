"""Predicts what a step takes in time and memory, under a schedule or without one, and its blocks. No torch."""

from .moving import MovingStep, simulate_moving
from .online import run_online
from .simulate import simulate, step_time_ms
from .step_blocks import BlockMaker, StepBlock, StepBlocks

__all__ = [
    "BlockMaker",
    "MovingStep",
    "StepBlock",
    "StepBlocks",
    "run_online",
    "simulate",
    "simulate_moving",
    "step_time_ms",
]
