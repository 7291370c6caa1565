"""When to do what takes long and may be in vain."""

from __future__ import annotations


class Seldom:
    """Says when to do what takes long: first, second, fourth time and so on, and at once after a success."""

    def __init__(self) -> None:
        self._times, self._next = 0, 1

    def is_due(self) -> bool:
        """Whether to do it this time."""
        self._times += 1
        if self._times < self._next:
            return False
        self._next = 2 * self._times
        return True

    def has_found(self) -> None:
        """Do it the next time as well."""
        self._times, self._next = 0, 1
