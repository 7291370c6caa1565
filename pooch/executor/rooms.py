"""Room in the swap tier for values that outlive steps. What one of them gives back serves the next one of its size."""

from __future__ import annotations

from collections import defaultdict

from ..machine.values import Place
from .tier import StepTier


class Rooms:
    """Room in a tier by size.

    Args:
        tier: Where it is taken.
    """

    def __init__(self, tier: StepTier) -> None:
        self._tier = tier
        self._free: defaultdict[int, list[Place]] = defaultdict(list)

    def take(self, size_bytes: int) -> Place | None:
        """Return room for a value, or None if the tier has no more."""
        free = self._free[size_bytes]
        return free.pop() if free else self._tier.take(size_bytes)

    def take_spare(self, size_bytes: int) -> Place | None:
        """Return room that can be done without. None, too, where what the tier may take is limited."""
        return self.take(size_bytes) if self._free[size_bytes] or not self._tier.is_limited else None

    def give_back(self, size_bytes: int, place: Place) -> None:
        """Have room serve the next value of its size."""
        self._free[size_bytes].append(place)
