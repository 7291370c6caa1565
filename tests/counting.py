"""The counting allocator for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator


def the_allocator() -> CountingAllocator:
    allocator = counting_allocator()
    assert isinstance(allocator, CountingAllocator), allocator
    return allocator


@contextmanager
def counting() -> Iterator[CountingAllocator]:
    """The allocator in place, and afterwards as it was."""
    allocator = the_allocator()
    user = object()
    assert allocator.install(user)
    try:
        yield allocator
    finally:
        allocator.lift_limit()
        allocator.ask_for_room(False)
        allocator.remove(user)
