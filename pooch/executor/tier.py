"""Room in the swap tier for values of unknown number and size."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from ..ground.errors import TierError
from ..ground.units import format_bytes, round_up
from ..machine.values import Ticket
from .engines.health import BY_LIMIT
from .engines.protocol import Arena, CopyEngine

CHUNK_BYTES = 256 * 2**20
_LIMITED_CHUNKS = 8  # where there is a limit, chunks must not be so large that a part of it cannot be used
_ALIGNMENT_BYTES = 4096  # offsets in a tier are multiples of this
_SMALLER = 4  # times: the next chunk to ask for where a tier has no room for one
_MOST_FAILURES = 3  # copies in a row, after which a step asks the tier for no more: each try takes time


def rounded_bytes(size_bytes: int) -> int:
    """What a value of some size takes of the tier: no two begin at one offset."""
    return round_up(max(1, size_bytes), _ALIGNMENT_BYTES)


@dataclass
class _Chunk:
    """A part of the tier. Rooms are taken from its end, and all of it is free again when none is in use."""

    arena: Arena
    size_bytes: int
    end_bytes: int = 0
    in_use: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """A place for one value."""

    tier: StepTier = field(repr=False)
    chunk: _Chunk = field(repr=False)
    offset_bytes: int

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended.

        Args:
            error: Why it failed, or None.
        """
        self.tier.copied(error)

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        """Start copying a storage here."""
        return self.chunk.arena.copy_out(storage, self.offset_bytes)

    def copy_in(self, storage: torch.UntypedStorage) -> Ticket:
        """Start filling a storage from here."""
        return self.chunk.arena.copy_in(storage, self.offset_bytes)

    def release(self) -> None:
        """Give the room back."""
        self.chunk.in_use -= 1
        if self.chunk.in_use == 0:
            self.chunk.end_bytes = 0


class StepTier:
    """The room of one step, which grows as it is needed.

    Args:
        engine: The copy engine.
        most_bytes: The most that the step may take of the tier, or None.
        planned: Room that the step has by its plan, or None. Whoever opened it closes it.
    """

    def __init__(self, engine: CopyEngine, most_bytes: int | None = None, planned: Arena | None = None) -> None:
        self._engine, self._most_bytes = engine, most_bytes
        self._chunk_bytes = CHUNK_BYTES if most_bytes is None else min(CHUNK_BYTES, most_bytes // _LIMITED_CHUNKS)
        self._chunks: list[_Chunk] = []
        self._size_bytes = 0
        self._failures = 0
        self._refused_bytes: int | None = None  # so much could not be had: more is not asked for again in this step
        self._is_planned = planned is not None
        self._streams = engine.open_arena(0) if planned is None else planned

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to what the tier may take."""
        return self._most_bytes is not None or self._engine.room.limit_bytes is not None

    def take(self, size_bytes: int) -> Room | None:
        """Return room for a value, or None if the tier has no more."""
        needed = rounded_bytes(size_bytes)
        if self._failures >= _MOST_FAILURES:
            return None
        chunk = next((each for each in self._chunks if each.size_bytes - each.end_bytes >= needed), None)
        if chunk is None:
            chunk = self._new_chunk(needed)
        if chunk is None:
            return None
        room = Room(self, chunk, chunk.end_bytes)
        chunk.end_bytes += needed
        chunk.in_use += 1
        return room

    def reserve(self, size_bytes: int) -> None:
        """Take room that nothing else can take until it is needed, if there is so much."""
        try:
            self._chunks.append(self._opened(size_bytes))
            self._size_bytes += size_bytes
        except TierError as error:
            self._engine.health.failed(error)

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy into the tier ended.

        Args:
            error: Why it failed, or None.
        """
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        self._engine.health.failed(error)

    def _new_chunk(self, needed: int) -> _Chunk | None:
        """Take a chunk, the smaller the less room there is. The tier notes why it has none."""
        if self._refused_bytes is not None and needed >= self._refused_bytes:
            return None
        size_bytes = max(needed, self._chunk_bytes)
        while True:
            try:
                chunk = self._opened(size_bytes)
                break
            except TierError as error:
                if size_bytes == needed:
                    self._refused_bytes = needed
                    self._engine.health.failed(error)
                    return None
                size_bytes = self._chunk_bytes = max(needed, size_bytes // _SMALLER)
        self._chunks.append(chunk)
        self._size_bytes += size_bytes
        return chunk

    def _opened(self, size_bytes: int) -> _Chunk:
        most_bytes = self._most_bytes
        if most_bytes is not None and self._size_bytes + size_bytes > most_bytes:
            limited_by = self._engine.room.limited_by
            raise TierError(f"the swap tier is limited to {format_bytes(most_bytes)}: raise the {limited_by}", BY_LIMIT)
        return _Chunk(self._engine.open_arena(size_bytes), size_bytes)

    def is_beside(self) -> bool:
        """Whether the calling thread computes on another stream than the step."""
        return self._streams.is_beside()

    def at_home(self) -> AbstractContextManager[None]:
        """Let the calling thread compute on the step's stream inside."""
        return self._streams.at_home()

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """Order copies with the calling thread's stream, since it works on these storages."""
        for arena in (self._streams, *(chunk.arena for chunk in self._chunks)):
            arena.join(storages)

    def close(self) -> None:
        """Release the room."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            chunk.arena.close()
        if not self._is_planned:
            self._streams.close()
