"""How long Pooch works in the middle of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


class OwnTime:
    """Measures what runs within it: `with own_time: ...`. What is within something else that it measures counts once.

    Attributes:
        ms: Time so far.
    """

    __slots__ = ("_depth", "_since_s", "ms")

    def __init__(self) -> None:
        self.ms = self._since_s = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        if self._depth == 0:
            return  # it was restarted meanwhile
        self._depth -= 1
        if self._depth == 0:
            self.ms += (time.perf_counter() - self._since_s) * 1000

    def measured(self, function: Callable[[_T], _R]) -> Callable[[_T], _R]:
        """Return what does the same as a function, measured. It takes less than `with`, for each saved tensor."""

        def call(argument: _T) -> _R:
            if self._depth:
                return function(argument)
            self._depth, since_s = 1, time.perf_counter()
            try:
                return function(argument)
            finally:
                if self._depth:
                    self._depth = 0
                    self.ms += (time.perf_counter() - since_s) * 1000

        return call

    def restart(self) -> None:
        """Begin anew, with nothing under way: Ctrl-C may have kept `__exit__` from running."""
        self.ms, self._depth = 0.0, 0
