"""What is remembered of a value that leaves in order to be made again: a checksum, and perhaps a copy."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from ..torchtools.checksums import checksum, sample_checksum
from .engines.protocol import Ticket


class Level(IntEnum):
    """How closely a replay is looked at. `BANNED` is not replayed at all."""

    NONE = 0
    SAMPLE = 1
    WHOLE = 2
    COPIED = 3
    BANNED = 4


class Place(Protocol):
    """Room in the tier for the copy of one value."""

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        """Start copying a storage here."""

    def copy_in(self, storage: torch.UntypedStorage) -> Ticket:
        """Start filling a storage from here."""

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended: why it failed, or None."""


@dataclass(slots=True)
class Witness:
    """What is remembered of a value that leaves in order to be made again.

    Attributes:
        key: Its recipe.
        level: How closely the replay is looked at.
        digest: Checksum of its bytes, of a sample of them up to `Level.SAMPLE`.
        storage: Its bytes while the program still holds them, at which time they may still change.
        place: Its copy in the tier, or None.
        ticket: The copy under way.
    """

    key: Hashable
    level: Level
    digest: int = 0
    storage: torch.UntypedStorage | None = None
    place: Place | None = None
    ticket: Ticket | None = None

    def take(self, storage: torch.UntypedStorage) -> None:
        """Remember the bytes of a storage."""
        self.digest = self._digest_of(storage)

    def agrees(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage holds the bytes that are remembered."""
        return self._digest_of(storage) == self.digest

    def _digest_of(self, storage: torch.UntypedStorage) -> int:
        return sample_checksum(storage) if self.level == Level.SAMPLE else checksum(storage)

    def start_copy(self, place: Place, storage: torch.UntypedStorage) -> None:
        """Begin to copy the bytes to the tier."""
        self.place, self.ticket = place, place.copy_out(storage)

    def finish_copy(self) -> float:
        """Wait for the copy, which may have failed, and return for how many ms the caller was blocked."""
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            return 0.0
        waited_ms = ticket.wait()
        if self.place is not None:
            self.place.copied(ticket.error)
        if ticket.error is not None:
            self.place = None
        return waited_ms

    def leave(self, storage: torch.UntypedStorage) -> float:
        """Remember the bytes as they are now, when the program has released them or is about to lose them.

        A copy that was begun earlier is made again if they have changed since. Returns for how many ms the caller was
        blocked.
        """
        self.storage = None
        waited_ms = self.finish_copy()
        before, self.digest = self.digest, self._digest_of(storage)
        if self.place is not None and before != self.digest:
            self.ticket = self.place.copy_out(storage)
            waited_ms += self.finish_copy()
        return waited_ms

    def restore(self, storage: torch.UntypedStorage) -> bool:
        """Fill a storage with the copy, and return whether it holds the right bytes then."""
        if self.place is None:
            return False
        ticket = self.place.copy_in(storage)
        ticket.wait()
        return ticket.error is None and checksum(storage) == self.digest
