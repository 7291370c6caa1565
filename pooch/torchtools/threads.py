"""Tells threads apart. Their numbers do not: that of a thread that has ended is given to another."""

from __future__ import annotations

import threading
import weakref


class _Token:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.token = _Token()


_HERE = _Here()


class OwnThread:
    """The thread in which it was made."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = weakref.ref(_HERE.token)

    @property
    def is_here(self) -> bool:
        """Whether it is the calling thread."""
        return self._token() is _HERE.token

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._token() is None


def is_alone() -> bool:
    """Whether no thread of the program but the calling one is running; those of Pooch, named after it, do not count."""
    here = threading.current_thread()
    return all(each is here or each.name.startswith("pooch-") for each in threading.enumerate())
