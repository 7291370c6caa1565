"""A CPU allocator that counts. It is compiled at its first use, and PyTorch's own serves where that fails."""

from .counting import CountingAllocator, counting_allocator

__all__ = ["CountingAllocator", "counting_allocator"]
