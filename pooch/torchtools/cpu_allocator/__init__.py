"""A CPU allocator that counts, and serves from an arena. It is compiled at its first use; PyTorch's own serves where
that fails."""

from .arena import ALIVE, NO_PLACE, ArenaCounters, ArenaFunctions, RecordedStep
from .counting import CountingAllocator, counting_allocator

__all__ = [
    "ALIVE",
    "NO_PLACE",
    "ArenaCounters",
    "ArenaFunctions",
    "CountingAllocator",
    "RecordedStep",
    "counting_allocator",
]
