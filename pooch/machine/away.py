"""The values that are not there, by the order in which the backward pass reads them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .values import Value


class Away:
    """The values whose bytes are not on the device, in the order of saving. What has come back since is left out."""

    def __init__(self) -> None:
        self._saved_at: list[int] = []
        self._values: dict[int, Value] = {}

    def add(self, value: Value) -> None:
        """Add a value that has left."""
        if value.saved_at and value.saved_at not in self._values:
            insort(self._saved_at, value.saved_at)
            self._values[value.saved_at] = value

    def discard(self, value: Value) -> None:
        """Remove a value, if it is there."""
        if self._values.get(value.saved_at) is value:
            self._remove(bisect_left(self._saved_at, value.saved_at))

    def before(self, position: int, reach: int) -> Iterator[Value]:
        """Yield those that were saved before a position, the latest first.

        Args:
            position: in the order of saving.
            reach: how many saves before it are looked at.
        """
        place = bisect_left(self._saved_at, position) - 1
        while place >= 0 and self._saved_at[place] >= position - reach:
            value = self._values[self._saved_at[place]]
            if value.storage is None:
                yield value
            else:
                self._remove(place)
            place = min(place, len(self._saved_at)) - 1  # some may have left, or ended, meanwhile

    def bytes(self) -> int:
        """The size of all of them."""
        return sum(value.size_bytes for value in self._values.values() if value.storage is None)

    def _remove(self, place: int) -> None:
        del self._values[self._saved_at.pop(place)]
