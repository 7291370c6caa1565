"""The values that are not there, and in the order in which the backward pass reads them those that the tier has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from .values import Value


class Away:
    """The values whose bytes are not on the device. What has come back since is left out.

    Attributes:
        copied_at: When those that the tier has were saved, the first one first, with some that are back already.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}  # by when they were saved
        self.copied_at: list[int] = []  # the tier has few where most are made again

    def add(self, value: Value) -> None:
        """Add a value that has left."""
        if not value.saved_at:
            return
        self._values[value.saved_at] = value
        place = bisect_left(self.copied_at, value.saved_at)
        if value.is_copied and self.copied_at[place : place + 1] != [value.saved_at]:
            self.copied_at.insert(place, value.saved_at)

    def discard(self, value: Value) -> None:
        """Remove a value, if it is there."""
        if self._values.get(value.saved_at) is not value:
            return
        del self._values[value.saved_at]
        place = bisect_left(self.copied_at, value.saved_at)
        if self.copied_at[place : place + 1] == [value.saved_at]:
            del self.copied_at[place]

    def before(self, position: int, reach: int) -> Iterator[Value]:
        """Yield those that the tier has and that were saved before a position, the latest first.

        Args:
            position: in the order of saving.
            reach: how many saves before it are looked at.
        """
        place = bisect_left(self.copied_at, position) - 1
        while place >= 0 and self.copied_at[place] >= position - reach:
            value = self._values[self.copied_at[place]]
            if value.storage is None and value.is_copied:
                yield value
            else:
                del self.copied_at[place]
            place = min(place, len(self.copied_at)) - 1  # some may have left, or ended, meanwhile
