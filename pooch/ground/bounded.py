"""Collections that do not grow without end: beyond a limit they forget what was not used for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class RecentlyUsed(Generic[Key, Item]):
    """A mapping that keeps the items that were used last.

    Args:
        most: The most items that it keeps.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._items: OrderedDict[Key, Item] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def get(self, key: Key) -> Item | None:
        """Return an item, which counts as a use of it, or None."""
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def look(self, key: Key) -> Item | None:
        """Return an item, or None; this is no use of it."""
        return self._items.get(key)

    def put(self, key: Key, item: Item) -> list[tuple[Key, Item]]:
        """Keep an item, and return those that are forgotten for it."""
        self._items[key] = item
        self._items.move_to_end(key)
        return [self.forget_oldest() for _ in range(len(self._items) - self.most)]

    def forget_oldest(self) -> tuple[Key, Item]:
        """Forget the item that was not used for the longest time, and return it."""
        return self._items.popitem(last=False)

    def keys(self) -> list[Key]:
        """Return the keys, those of the items that were used last at the end."""
        return list(self._items)

    def values(self) -> list[Item]:
        """Return the items, those that were used last at the end."""
        return [item for _, item in self.items()]

    def items(self) -> list[tuple[Key, Item]]:
        """Return keys and items, those that were used last at the end."""
        # Looking a key up may run Python, and another thread then. The list of keys alone is made in one go.
        return [(key, item) for key in list(self._items) if (item := self._items.get(key)) is not None]


class Topics:
    """What was said already, so that it is not said again. What was not come across for long may be said once more.

    Args:
        most: The most topics that are remembered.
    """

    def __init__(self, most: int = 4096) -> None:
        self._said: RecentlyUsed[Hashable, bool] = RecentlyUsed(most)

    def is_new(self, topic: Hashable) -> bool:
        """Whether a topic comes up for the first time. It does not the next time."""
        if self._said.get(topic):
            return False
        self._said.put(topic, True)
        return True
