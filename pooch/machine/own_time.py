"""How long Pooch works in the middle of a step."""

from __future__ import annotations

import time


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

    def restart(self) -> None:
        """Begin anew, with nothing under way: Ctrl-C may have kept `__exit__` from running."""
        self.ms, self._depth = 0.0, 0
