"""What Pooch does itself in the middle of the program."""

from __future__ import annotations

import threading


class _OwnWork(threading.local):
    """Marks what the current thread does as Pooch's own work rather than the program's: `with OWN_WORK: ...`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1

    def is_over(self) -> None:
        """Note that the thread does none, as a step begins. Ctrl-C may have kept `__exit__` from running."""
        self.depth = 0


OWN_WORK = _OwnWork()
