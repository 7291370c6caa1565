"""Plans that were asked for and wait to be made: urgent ones first, and no more than can be of use by then."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from .jobs import Answer, Job
from .known import Known
from .signature import StepKey

MOST_WAITING = 64  # requests; one takes from a fraction of a second to some seconds


@dataclass(frozen=True, slots=True, eq=False)  # jobs hold whole profiles
class Request:
    """A plan that was asked for.

    Attributes:
        key: What it is asked for.
        known: What is known of it.
        job: What is to be done. One that knows a plan is to improve it, which is not urgent.
        step_ms: The time that a step is predicted to take on the plan that is to be improved.
        away_bytes: What is away as the step of the job begins, which plain training has there.
        staying_bytes: What of the optimizers' state the plan that is to be improved leaves room for.
    """

    key: StepKey
    known: Known
    job: Job
    step_ms: float = 0.0
    away_bytes: int = 0
    staying_bytes: int = 0

    @property
    def is_urgent(self) -> bool:
        """Whether there is no plan yet."""
        return self.job.known is None

    def is_of_use(self, answer: Answer) -> bool:
        """Whether an answer says something new: of a plan to be improved, only a better one does."""
        if self.job.known is None:
            return True
        return answer.plan is not None and answer.plan.predicted_step_ms + answer.moving_ms < self.step_ms

    def drop(self) -> None:
        """Note that no answer will come, so that the next step of this kind asks again."""
        if self.is_urgent:
            self.known.is_pending = False
        else:
            self.known.is_improved = False


class JobQueue:
    """Requests by urgency, and then by age. Beyond the limit, of the least urgent ones the oldest is dropped.

    Args:
        most: The most requests that wait.

    Attributes:
        is_stopped: Whether nothing more is to be done.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: list[Request] = []
        self._lock = threading.Lock()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()  # at least one for each request that waits
        self.is_stopped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request) -> None:
        """Have a plan made. Another request may be dropped for it, or it is itself."""
        dropped = None
        with self._lock:
            self._waiting.append(request)
            if len(self._waiting) > self._most:
                dropped = min(self._waiting, key=lambda each: each.is_urgent)  # the first of them is the oldest
                self._waiting.remove(dropped)
        if dropped is None:
            self._signals.put(None)
        else:
            dropped.drop()

    def wake(self) -> None:
        """Have `next` return although nothing is asked for."""
        self._signals.put(None)

    def next(self, timeout_s: float) -> Request | None:
        """Wait for the next request, and return it; None if it was only woken, or stopped.

        Args:
            timeout_s: How long to wait.

        Raises:
            queue.Empty: None has come in that time.
        """
        self._signals.get(timeout=timeout_s)
        with self._lock:
            if self.is_stopped or not self._waiting:
                return None
            found = max(self._waiting, key=lambda each: each.is_urgent)
            self._waiting.remove(found)
            return found

    def stop(self) -> None:
        """Have nothing more done. This may be called at any point, by the garbage collector too."""
        self.is_stopped = True
        self.wake()
