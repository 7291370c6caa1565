"""How fast copies to and from the tier are, as seen so far."""

from __future__ import annotations

from ..ir import Link

_FIRST_GUESS_BYTES_PER_MS = 1e6  # 1 GB/s
_WEIGHT = 0.2  # of the latest copy
_COMPUTE_SHARE = 0.2  # of a copy's time that compute loses, a guess for one core of several


class CopySpeed:
    """A running estimate of the tier's bandwidth.

    Args:
        tier: What the tier is.
        bytes_per_ms: What is known of its bandwidth so far.
    """

    def __init__(self, tier: str, bytes_per_ms: float = _FIRST_GUESS_BYTES_PER_MS) -> None:
        self._tier = tier
        self._bytes_per_ms = bytes_per_ms

    def link(self) -> Link:
        """Return the estimate as a link whose copies go one after the other."""
        rate = self._bytes_per_ms
        tier = f"{self._tier}; rates as seen in training"
        return Link(tier, 0.05, 0.05, rate, rate, False, _COMPUTE_SHARE, _COMPUTE_SHARE)

    def copy_ms(self, size_bytes: int) -> float:
        """Expected time of a copy in ms."""
        return size_bytes / self._bytes_per_ms

    def note(self, size_bytes: int, copy_ms: float) -> None:
        """Take a copy into account whose whole time was spent waiting."""
        if copy_ms > 0.05:
            seen = size_bytes / copy_ms
            self._bytes_per_ms += _WEIGHT * (seen - self._bytes_per_ms)
