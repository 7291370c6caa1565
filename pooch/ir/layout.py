"""Blocks with lifetimes, and their offsets in one arena: what packing takes and gives. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ..ground.units import format_bytes, plural


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
        is_native: whether there was a C++ compiler, without which nothing is searched.
        is_proven: whether no arena is smaller by one unit of alignment or more: this one is at the bound, or all others
            were tried.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    bound_bytes: int
    policy: str
    rounds: int = 0
    is_native: bool = False
    is_proven: bool = False

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


BlockKind = Literal["keep", "swap", "recompute", "fixed", "replay", "before", "program", "gradient", "temporary"]
OF_VALUES = ("keep", "swap", "recompute", "fixed", "replay")  # kinds of blocks that a value names; an op names others


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of a planned step, and where it lies.

    Attributes:
        kind: "keep", "swap" and "recompute" for activations; "fixed" for values without a decision; "replay" for what
            a replay makes on the way; "temporary" for workspaces of ops and replays; "gradient" and "program" for what
            else backward and forward pass hold; "before" for what existed before the step and is freed in it.
        target: id of the value; index of the op that makes it where it is none; -1: unknown.
        lower: the first tick of the step at which it lives.
        upper: the first tick at which it no longer lives.
        size_bytes: its bytes.
        alignment_bytes: its offset is a multiple of this.
        offset: in bytes from the arena's beginning.
    """

    kind: BlockKind
    target: int
    lower: int
    upper: int
    size_bytes: int
    alignment_bytes: int
    offset: int

    @property
    def block(self) -> Block:
        """What is packed."""
        return Block(self.lower, self.upper, self.size_bytes, self.alignment_bytes, f"{self.kind} {self.target}")


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One arena for everything that a planned step allocates, predicted from its schedule.

    Attributes:
        policy: of packing.
        outside_bytes: what exists before, in and after the step; it is in no arena of the step.
        arena_bytes: the end of the highest block.
        bound_bytes: the highest sum of live bytes of the blocks: no arena can be smaller.
        blocks: in order of their beginnings.
    """

    policy: str
    outside_bytes: int
    arena_bytes: int
    bound_bytes: int
    blocks: tuple[PlacedBlock, ...]

    def __repr__(self) -> str:
        return (
            f"StepLayout({self.policy}: {plural(len(self.blocks), 'block')} in {format_bytes(self.arena_bytes)}, "
            f"{self.ratio:.4f} times its bound)"
        )

    @property
    def total_bytes(self) -> int:
        """All device bytes with this arena."""
        return self.outside_bytes + self.arena_bytes

    @property
    def ratio(self) -> float:
        """Arena over bound; 1 is optimal."""
        return self.layout.ratio

    @property
    def layout(self) -> Layout:
        """The offsets by themselves, as the verifier takes them."""
        offsets = tuple(block.offset for block in self.blocks)
        return Layout(offsets, self.arena_bytes, self.bound_bytes, self.policy)
