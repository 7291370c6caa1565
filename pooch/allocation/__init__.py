"""Training on an arena: warm steps are recorded, their blocks packed, and later steps served from one arena."""

from .blocks import blocks_of, common_step
from .driver import ArenaOptions, StepArena, open_arena

__all__ = ["ArenaOptions", "StepArena", "blocks_of", "common_step", "open_arena"]
