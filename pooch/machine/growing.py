"""A budget that is a share of what a step would take if nothing left the device, counted while values leave."""

from __future__ import annotations

from .account import LiveBytes
from .values import Value


class GrowingBudget:
    """The share of a step's in-core peak, as far as that is known: it grows with the step.

    What would be live in-core is what is live, and what has left and would still be here. Between two moves only the
    first changes. So each move looks at its highest value since the one before, and begins to look for it anew. What is
    live on the way to a value that is replayed counts as well, though plain training does not make it.

    Args:
        live: Counts live bytes. Its peak is that since the latest move from now on.
        share: The share. Also an attribute.
        replays: Whether values may be replayed. Without that the peak is exact.

    Attributes:
        live_peak_bytes: The highest live bytes up to the latest move.
    """

    def __init__(self, live: LiveBytes, share: float, *, replays: bool = False) -> None:
        self._live, self.share, self.replays = live, share, replays
        self._away: dict[Value, int] = {}
        self._away_bytes = self.live_peak_bytes = 0
        self._peak_bytes = live.now()

    def left(self, value: Value) -> None:
        """Note that the bytes of a value were dropped, or that they are away as this begins."""
        self._look()
        self._away_bytes += value.size_bytes - self._away.get(value, 0)
        self._away[value] = value.size_bytes

    def comes(self, value: Value) -> None:
        """Note that memory for a value is about to be allocated, or that it has ended while it was away."""
        size_bytes = self._away.pop(value, None)
        if size_bytes is not None:
            self._look()
            self._away_bytes -= size_bytes

    def size_bytes(self, live_bytes: int = 0) -> int:
        """Return the budget by now.

        Args:
            live_bytes: What is thought to be live in a moment. It is counted once it is.
        """
        return int(self.share * max(self.peak_bytes, live_bytes + self._away_bytes))

    @property
    def peak_bytes(self) -> int:
        """The in-core peak so far."""
        self._look()
        return self._peak_bytes

    def _look(self) -> None:
        peak_bytes = self._live.peak()
        self.live_peak_bytes = max(self.live_peak_bytes, peak_bytes)
        self._peak_bytes = max(self._peak_bytes, peak_bytes + self._away_bytes)
        self._live.reset_peak()
