"""Blocks as arrays, with their times replaced by ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ..ground.errors import UsageError
from ..ground.units import MOST_BYTES
from ..ir.layout import Block

Integers = NDArray[np.int64]
Order = NDArray[np.int32]
_MOST_TIME = 2**62


@dataclass(frozen=True, slots=True)
class Instance:
    """The blocks that take room.

    Attributes:
        places: their positions among the blocks that were given; the others have no bytes.
        lower, upper: ranks of their times.
        lifetimes: how long each lives, in the unit that was given.
        sizes: in bytes, up to the next multiple of what all alignments are multiples of: nothing else fits in between.
        alignments: in bytes.
        n_times: number of distinct times.
        bound_bytes: the highest sum of these sizes that live at once. A search is content with it, although the gap
            above the highest block may leave the arena a little smaller.
        granule_bytes: what all sizes and alignments are multiples of.
    """

    places: Integers
    lower: NDArray[np.int32]
    upper: NDArray[np.int32]
    lifetimes: Integers
    sizes: Integers
    alignments: Integers
    n_times: int
    bound_bytes: int
    granule_bytes: int


def instance_of(blocks: Sequence[Block]) -> Instance:
    """Return the blocks as arrays.

    Raises:
        UsageError: a block has no lifetime, negative bytes, an alignment below one, or numbers beyond 60 bits.
    """
    for index, block in enumerate(blocks):
        _check(block, index)
    if sum(block.size_bytes + block.alignment_bytes for block in blocks) > MOST_BYTES:
        raise UsageError("the blocks have more than 2**60 bytes in total: check the unit of their sizes")
    places = [index for index, block in enumerate(blocks) if block.size_bytes > 0]
    table = [
        (block.lower, block.upper, block.size_bytes, block.alignment_bytes) for block in map(blocks.__getitem__, places)
    ]
    lower, upper, sizes, alignments = np.array(table, dtype=np.int64).reshape(-1, 4).T
    unit = gcd(*alignments.tolist()) or 1
    sizes = -(-sizes // unit) * unit
    times, ranks = np.unique(np.concatenate([lower, upper]), return_inverse=True)
    begins, ends = ranks[: len(table)], ranks[len(table) :]
    changes = np.zeros(len(times) + 1, dtype=np.int64)
    np.add.at(changes, begins, sizes)
    np.add.at(changes, ends, -sizes)
    both = zip(sizes.tolist(), alignments.tolist(), strict=True)
    granules = (gcd(size, alignment) if alignment > 1 else size for size, alignment in both)
    return Instance(
        places=np.array(places, dtype=np.int64),
        lower=begins.astype(np.int32),
        upper=ends.astype(np.int32),
        lifetimes=upper - lower,
        sizes=sizes,
        alignments=np.ascontiguousarray(alignments),
        n_times=len(times),
        bound_bytes=int(np.cumsum(changes).max(initial=0)),
        granule_bytes=gcd(*granules),
    )


def part_of(instance: Instance, chosen: Integers) -> Instance:
    """Return some of the blocks as an instance whose bound is that of all."""
    if len(chosen) == len(instance.sizes):
        return instance
    return replace(
        instance,
        places=instance.places[chosen],
        lower=instance.lower[chosen],
        upper=instance.upper[chosen],
        lifetimes=instance.lifetimes[chosen],
        sizes=instance.sizes[chosen],
        alignments=instance.alignments[chosen],
    )


def arena_of(instance: Instance, offsets: Integers) -> int:
    """Return the end of the highest block."""
    return int((offsets + instance.sizes).max(initial=0))


def _check(block: Block, index: int) -> None:
    named = f"block {block.name or index}"
    if block.lower >= block.upper:
        raise UsageError(f"{named} lives from {block.lower} to {block.upper}: upper must be larger than lower")
    if block.size_bytes < 0:
        raise UsageError(f"{named} has a negative size ({block.size_bytes}): give bytes, zero or more")
    if block.alignment_bytes < 1:
        raise UsageError(f"{named} has an alignment of {block.alignment_bytes}: give 1 or more bytes")
    if max(abs(block.lower), abs(block.upper)) > _MOST_TIME:
        raise UsageError(f"{named} has a time beyond 2**62: give times as smaller integers")
