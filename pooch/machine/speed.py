"""How fast copies to and from the tier are, as seen so far."""

from __future__ import annotations

_FIRST_GUESS_BYTES_PER_MS = 1e6  # 1 GB/s
_WEIGHT = 0.2  # of the latest copy


class CopySpeed:
    """A running estimate of the tier's bandwidth.

    Args:
        tier: What the tier is. Also an attribute.
        bytes_per_ms: What is known of its bandwidth so far.
    """

    def __init__(self, tier: str, bytes_per_ms: float = _FIRST_GUESS_BYTES_PER_MS) -> None:
        self.tier = tier
        self._bytes_per_ms = bytes_per_ms

    @property
    def bytes_per_ms(self) -> float:
        """The bandwidth as seen so far."""
        return self._bytes_per_ms

    def copy_ms(self, size_bytes: int) -> float:
        """Expected time of a copy in ms."""
        return size_bytes / self._bytes_per_ms

    def note(self, size_bytes: int, copy_ms: float) -> None:
        """Take a copy into account whose whole time was spent waiting."""
        if copy_ms > 0.05:
            seen = size_bytes / copy_ms
            self._bytes_per_ms += _WEIGHT * (seen - self._bytes_per_ms)
