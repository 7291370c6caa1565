"""Taking items of one's own out of one of PyTorch's stacks, and putting them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LiftedStack:
    """One of PyTorch's stacks of the thread.

    Args:
        pop: Takes the topmost item away and returns it, or returns None.
        push: Puts an item on top.
        ours: Returns what of ours an item is, or None.
        count: Returns how many of ours are placed.
    """

    def __init__(
        self,
        pop: Callable[[], Any],
        push: Callable[[Any], None],
        ours: Callable[[Any], Any],
        count: Callable[[], int],
    ) -> None:
        self._pop, self._push, self._ours, self._count = pop, push, ours, count

    def take(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Take items away until there are enough or none is left, and return them, the lowest first."""
        found: list[Any] = []
        while not enough(found) and (top := self._pop()) is not None:
            found.insert(0, top)
        return found

    def put(self, items: list[Any]) -> None:
        """Put items on it."""
        for item in items:
            self._push(item)

    def lift(self) -> list[Any]:
        """Take ours away, and return what lay there from the lowest of them on."""
        count = self._count()
        before = self.take(lambda found: sum(self._ours(item) is not None for item in found) >= count)
        for item in before:
            mine = self._ours(item)
            if mine is None:
                self._push(item)
            else:
                mine.is_lifted = True
        return before

    def put_back(self, before: list[Any]) -> None:
        """Put ours back, where they were unless others have come or gone. Some may have ended meanwhile."""
        mine = [item for item in before if (each := self._ours(item)) is not None and each.is_lifted]
        others = [item for item in before if self._ours(item) is None and not hasattr(item, "is_lifted")]
        now = self.take(lambda found: len(found) >= len(others))
        is_unchanged = len(now) == len(others) and all(map(_is_same, now, others))
        self.put([item for item in before if item in mine or item in others] if is_unchanged else [*now, *mine])
        for item in mine:
            self._ours(item).is_lifted = False


def _is_same(one: Any, other: Any) -> bool:
    return one[0] is other[0] if isinstance(one, tuple) else one is other
