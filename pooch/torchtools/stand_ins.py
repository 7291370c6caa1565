"""Stand-ins for methods of classes and functions of modules, in place as long as anybody uses them."""

from __future__ import annotations

import threading
import weakref
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
        """Put the stand-in there, if it is not."""
        if self._placed is not None:
            return
        self._original = vars(self._owner).get(self._name, _MISSING)
        method = getattr(self._owner, self._name, None) if self._original is _MISSING else self._original
        if method is not None:
            self._placed = self._stand_in(method)
            setattr(self._owner, self._name, self._placed)

    def take(self) -> None:
        """Take it away, unless the program has put something of its own there, which passes calls on to it."""
        placed = self._placed
        if placed is not None and vars(self._owner).get(self._name) is placed:
            if self._original is _MISSING:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)
        self._placed = None


class StandIns:
    """Some places that hold stand-ins as long as anybody uses them."""

    def __init__(self, *places: Place) -> None:
        self._places, self._lock = places, threading.RLock()
        self._users: dict[int, weakref.ref[object]] = {}  # a run may be dropped without an end

    def use(self, user: object) -> None:
        """Put the stand-ins in place, if they are not.

        Args:
            user: It should `leave`, which may come in another thread. It is not kept alive.
        """
        with self._lock:
            if not self._users:
                for place in self._places:
                    place.put()
            self._users[id(user)] = weakref.ref(user)

    def leave(self, user: object) -> None:
        """Take the stand-ins away with the last user. May be repeated.

        Args:
            user: It uses them no longer.
        """
        with self._lock:
            self._users.pop(id(user), None)
            if all(each() is None for each in self._users.values()):
                self._users.clear()
                for place in self._places:
                    place.take()


class LastingUser:
    """Uses stand-ins from the first time on that they are needed, until it ends.

    Putting them in place for each step, and taking them away again, takes a large part of what a short step costs. And
    each time, CPython forgets what it has learned of a class; from 3.13 on it learns no more of one that has changed a
    thousand times.
    """

    def __init__(self) -> None:
        self._used: list[StandIns] = []
        self._is_over = False

    def use(self, stand_ins: StandIns) -> None:
        """Use stand-ins to the end of this. Nothing is done if that has come."""
        if not self._is_over and stand_ins not in self._used:
            self._used.append(stand_ins)
            stand_ins.use(self)

    def end(self) -> None:
        """Use none any longer. May be repeated."""
        self._is_over = True
        while self._used:
            self._used[-1].leave(self)
            self._used.pop()
