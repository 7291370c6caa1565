"""Files and blocks of a swap tier that wait for the next step.

What is new is as large as it has to be, and what is free is used again even where it is larger, since that takes
nothing more. What is too small when something new is needed is given up first, so that the tier never has both; and
what nobody needed in its size for a while, such as the room of a plan that is followed no more, goes as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

FITTING = 2  # times what is asked for; what is larger than that is not needed in its size
IDLE = 32  # takes after which something that was not needed in its size is given up, and two more for each that is free


class _Sized(Protocol):
    """A file or block.

    Attributes:
        size_bytes: Its size.
        fitted_at: The number of the take that last needed it in its size.
    """

    size_bytes: int
    fitted_at: int


_Item = TypeVar("_Item", bound=_Sized)


def _forget(item: object) -> None:
    """Do nothing: it goes with the last reference to it."""


class FreeRoom(Generic[_Item]):
    """Room that is free now.

    Finalizers give room back in any thread and at any point, so the list is only changed by calls that are atomic.

    Args:
        dispose: Called with what is given up.
    """

    def __init__(self, dispose: Callable[[_Item], None] = _forget) -> None:
        self._dispose = dispose
        self._items: list[_Item] = []
        self._takes = 0

    def __len__(self) -> int:
        return len(self._items)

    def take(self, size_bytes: int) -> _Item | None:
        """Return the smallest that is large enough, or None; then nothing is left here.

        Args:
            size_bytes: The least size.
        """
        self._takes += 1
        self._give_up_idle(size_bytes)
        for item in sorted(self._items, key=lambda each: each.size_bytes):
            if item.size_bytes >= size_bytes and self._is_taken(item):
                if item.size_bytes <= FITTING * size_bytes:
                    item.fitted_at = self._takes
                return item
        self.clear()
        return None

    def give(self, item: _Item) -> None:
        """Take something back."""
        item.fitted_at = item.fitted_at or self._takes
        self._items.append(item)

    def clear(self) -> None:
        """Give up everything."""
        for item in list(self._items):
            if self._is_taken(item):
                self._dispose(item)

    def _give_up_idle(self, size_bytes: int) -> None:
        oldest = self._takes - IDLE - 2 * len(self._items)
        for item in list(self._items):
            fits = size_bytes <= item.size_bytes <= FITTING * size_bytes
            if item.fitted_at < oldest and not fits and self._is_taken(item):
                self._dispose(item)

    def _is_taken(self, item: _Item) -> bool:
        try:
            self._items.remove(item)
        except ValueError:  # another thread took it
            return False
        return True
