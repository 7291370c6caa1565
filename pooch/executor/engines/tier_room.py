"""How much of the swap tier an engine holds, and may hold."""

from __future__ import annotations

import threading

from ...ground.errors import TierError
from ...ground.units import format_bytes
from ...torchtools.endings import end_with
from .health import BY_LIMIT


class TierRoom:
    """Counts the bytes of an engine's files or blocks, those that wait for the next step included.

    Attributes:
        limit_bytes: The most that the engine may hold. None: no limit.
        limited_by: What the user sets to raise the limit.
        held_bytes: What it holds now.
        most_bytes: The most that it ever held.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.limited_by = "host budget"
        self.held_bytes = self.most_bytes = 0
        self._lock = threading.RLock()  # the garbage collector may give room back while some is being taken

    def has(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes more."""
        return self.limit_bytes is None or self.held_bytes + size_bytes <= self.limit_bytes

    def check(self, size_bytes: int) -> None:
        """Refuse to take more than there may be.

        Raises:
            TierError: There is no room for so many bytes more.
        """
        if not self.has(size_bytes):
            raise TierError(
                f"the swap tier is limited to {format_bytes(self.limit_bytes or 0)}, of which "
                f"{format_bytes(self.held_bytes)} are taken, and {format_bytes(size_bytes)} more are needed: raise the "
                f"{self.limited_by}",
                BY_LIMIT,
            )

    def hold(self, owner: object, size_bytes: int) -> None:
        """Count a file or block until it is gone."""
        with self._lock:
            self.held_bytes += size_bytes
            self.most_bytes = max(self.most_bytes, self.held_bytes)
        end_with(owner, self._give, size_bytes)

    def _give(self, size_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= size_bytes
