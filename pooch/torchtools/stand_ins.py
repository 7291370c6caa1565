"""Stand-ins for methods of classes and functions of modules, in place as long as anybody uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Place:
    """A name in a class or module.

    Args:
        owner: The class or module.
        name: The name. Nothing is done if there is no such name.
        stand_in: Returns what stands there instead, given what does now.
    """

    def __init__(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._stand_in = owner, name, stand_in
        self._original: Any = _MISSING
        self._placed: Any = None

    def put(self) -> None:
        """Put the stand-in there."""
        self._original = vars(self._owner).get(self._name, _MISSING)
        method = getattr(self._owner, self._name, None) if self._original is _MISSING else self._original
        self._placed = None if method is None else self._stand_in(method)
        if self._placed is not None:
            setattr(self._owner, self._name, self._placed)

    def take(self) -> None:
        """Take it away, unless the program has put something of its own there, which passes calls on to it."""
        placed, self._placed = self._placed, None
        if placed is None or vars(self._owner).get(self._name) is not placed:
            return
        if self._original is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class StandIns:
    """Some places that hold stand-ins as long as anybody uses them."""

    def __init__(self, *places: Place) -> None:
        self._places, self._users, self._lock = places, 0, threading.RLock()

    def use(self) -> None:
        """Put the stand-ins in place, if they are not. Needs a `leave`, which may come in another thread."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for place in self._places:
                    place.put()

    def leave(self) -> None:
        """Take the stand-ins away with the last user."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for place in self._places:
                    place.take()
