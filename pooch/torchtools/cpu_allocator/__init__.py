"""A CPU allocator that counts, and serves from an arena. Where it cannot be compiled, PyTorch's own serves."""

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
