"""One thread at a time works on a step: autograd reads and lets go of saved tensors in several."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from pooch.executor.records import Record


class StepLock:
    """A re-entrant lock on a step's state, and the handles that end while it is held.

    A handle may end anywhere: in the middle of our own work, where the garbage collector comes by, and in the thread
    that copies while others wait for its copies. So whoever ends one never waits for the lock: the handle is put in a
    queue, which is emptied at once where nobody is at work, and otherwise by who is, at the end of that.

    Args:
        ended: a method of what the lock belongs to; called for each handle that ended, with its record.
    """

    def __init__(self, ended: Callable[[Record], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._queue: deque[Record] = deque()
        self._ended = weakref.WeakMethod(ended)  # the step shall go by reference counts

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._queue and self._depth == 1:
            self._empty_queue()

    def __exit__(self, *exception: object) -> None:
        try:
            if self._depth == 1:
                self._empty_queue()
        finally:
            self._depth -= 1
            self._lock.release()
        self._settle()  # what came between the last look into the queue and the release

    def end(self, record: Record) -> None:
        """A handle on a record has ended."""
        self._queue.append(record)
        self._settle()

    def _settle(self) -> None:
        while self._queue and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # this very thread is at work, and empties the queue at the end
                self._depth = 1
                try:
                    self._empty_queue()
                finally:
                    self._depth = 0
            finally:
                self._lock.release()

    def _empty_queue(self) -> None:
        ended = self._ended()
        while self._queue:
            record = self._queue.popleft()
            if ended is not None:
                ended(record)
