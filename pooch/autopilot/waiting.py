"""Jobs that wait to be planned: urgent ones first, and no more than can be of use by the time that they are done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .jobs import Answer, Job

MOST_WAITING = 64  # jobs; one takes from a fraction of a second to some seconds


@dataclass(frozen=True, slots=True, eq=False)  # jobs hold whole profiles
class Waiting:
    """A job that waits.

    Attributes:
        urgency: The lowest goes first.
        job: The job; None if the process that does them is only to be started.
        done: Called with the answer.
        dropped: Called if it is not done, as there are too many others. It may be asked for again.
    """

    urgency: int
    job: Job | None
    done: Callable[[Answer], None]
    dropped: Callable[[], None]


class JobQueue:
    """Jobs by urgency, and then by age. Beyond the limit, of the least urgent ones the oldest is dropped.

    Args:
        most: The most jobs that wait.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: list[Waiting] = []
        self._lock = threading.Lock()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()  # at least one for each job that waits
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, waiting: Waiting) -> None:
        """Have a job done. Another one may be dropped for it, or it is itself."""
        dropped = None
        with self._lock:
            self._waiting.append(waiting)
            if len(self._waiting) > self._most:
                dropped = max(self._waiting, key=lambda each: each.urgency)  # the first of them is the oldest
                self._waiting.remove(dropped)
        if dropped is None:
            self._signals.put(None)
        else:
            dropped.dropped()

    def next(self, timeout_s: float) -> Waiting | None:
        """Wait for the next job and return it, or None once there are no more.

        Args:
            timeout_s: How long to wait.

        Raises:
            queue.Empty: None has come in that time.
        """
        while not self._is_stopped:
            self._signals.get(timeout=timeout_s)
            with self._lock:
                if self._waiting and not self._is_stopped:
                    found = min(self._waiting, key=lambda each: each.urgency)
                    self._waiting.remove(found)
                    return found
        return None

    def stop(self) -> None:
        """Have no further job done. This may be called at any point, by the garbage collector too."""
        self._is_stopped = True
        self._signals.put(None)
