"""The lock of a step. Autograd reads and releases saved tensors in several threads."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .values import Value


class StepLock:
    """A re-entrant lock on a step's state, with a queue of the handles that are destroyed while it is held.

    A handle may be destroyed anywhere: by the garbage collector in the middle of an action, or in the copy thread while
    other threads wait for its copies. So destroying a handle never waits for the lock. The handle is queued, and the
    queue is processed at once if the lock is free, and otherwise by its holder before releasing it.

    Args:
        ended: A method of the lock's owner that is called with the value of each destroyed handle.

    The native watch takes it and gives it back by itself, as `__enter__` and `__exit__` do.
    """

    __slots__ = ("_depth", "_ended", "_lock", "_owner", "_queue")

    def __init__(self, ended: Callable[[Value], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._queue: deque[Value] = deque()
        # Weak, as the step must be freed by reference counting. `WeakMethod` takes longer, for each handle of a step.
        method: Any = ended
        self._owner, self._ended = weakref.ref(method.__self__), method.__func__

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._queue and self._depth == 1:
            try:
                self._empty_queue()
            except BaseException:
                self._depth -= 1
                self._lock.release()
                raise

    def __exit__(self, *exception: object) -> None:
        try:
            if self._queue and self._depth == 1:
                self._empty_queue()
        finally:
            self._depth -= 1
            self._lock.release()
        if self._queue:  # handles queued between the last check and the release
            self._settle()

    def give_back(self) -> None:
        """Give back what an interrupt has left the calling thread with. It must not be within an action.

        Python may deliver Ctrl-C at the entry of `__exit__`, which then does nothing.
        """
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._depth = 0
            self._lock.release()
        self._settle()

    def end(self, value: Value) -> None:
        """Report that a handle on a value was destroyed."""
        self._queue.append(value)
        self._settle()

    def _settle(self) -> None:
        while self._queue and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # this thread holds the lock, and processes the queue before releasing it
                self._depth = 1
                try:
                    self._empty_queue()
                finally:
                    self._depth = 0
            finally:
                self._lock.release()

    def _empty_queue(self) -> None:
        owner = self._owner()
        while self._queue:
            value = self._queue.popleft()
            if owner is not None:
                self._ended(owner, value)
