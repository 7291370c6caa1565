"""What is packed, and what comes out: blocks with lifetimes, and their offsets in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed together for some time.

    Attributes:
        lower: the first time at which it lives.
        upper: the first time at which it no longer lives; larger than `lower`.
        size_bytes: its bytes, zero or more.
        alignment_bytes: its offset is a multiple of this.
        name: for messages.
    """

    lower: int
    upper: int
    size_bytes: int
    alignment_bytes: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each block lies.

    Attributes:
        offsets: of the blocks, in bytes from the arena's beginning, in the order in which the blocks were given.
        arena_bytes: the end of the highest block.
        bound_bytes: the highest sum of live bytes: no arena can be smaller.
        policy: what made it.
        rounds: of search that were begun; the same number with the same seed gives the same offsets.
        is_native: whether the compiled search ran, not its slower twin in Python.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    bound_bytes: int
    policy: str
    rounds: int = 0
    is_native: bool = False

    @property
    def ratio(self) -> float:
        """Arena over bound; 1 is optimal."""
        return self.arena_bytes / self.bound_bytes if self.bound_bytes else 1.0


def bound_of(blocks: Sequence[Block]) -> int:
    """Return the highest sum of bytes that live at the same time."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.lower] = changes.get(block.lower, 0) + block.size_bytes
        changes[block.upper] = changes.get(block.upper, 0) - block.size_bytes
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)
