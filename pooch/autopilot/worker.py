"""Planning beside training: one thread that waits for child processes, so that no step waits for a plan."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

from ..api.children import Child
from ..errors import PoochError
from ..progress import silent
from .costs import CostSource
from .jobs import WIRE, Anchor, Answer, Job
from .waiting import JobQueue, Waiting

IDLE_S = 60.0  # after which the planning process ends; the next job starts another


class PlanningWorker:
    """Makes plans in a child process, one after the other; urgent jobs first. Its thread ends with the process.

    Args:
        costs: What copies and hooks cost. Closed with the thread.

    Attributes:
        busy_s: Time for which it has measured and planned.
    """

    def __init__(self, costs: CostSource) -> None:
        self._jobs = JobQueue()
        self.costs, self.busy_s = costs, 0.0
        self._thread: threading.Thread | None = None
        self._process = _PlanningProcess()

    def warm_up(self) -> None:
        """Start the process, which takes a while, since a job will come soon."""
        self._put(Waiting(1, None, _ignored, _nothing))

    def plan(
        self, job: Job, done: Callable[[Answer], None], *, urgency: int = 0, dropped: Callable[[], None] | None = None
    ) -> None:
        """Have a job done.

        Args:
            job: The job.
            done: Called with the answer, in the worker's thread.
            urgency: A low one goes first.
            dropped: Called if it is not done, as too many others wait. None: nobody wants to know.
        """
        self._put(Waiting(urgency, job, done, dropped or _nothing))

    def _put(self, waiting: Waiting) -> None:
        self._jobs.put(waiting)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._process, weakref.ref(self)), name="pooch-planning", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the process, and have the thread end. A job that is being done is not answered."""
        self._jobs.stop()
        self._process.kill(for_good=True)

    def join(self) -> None:
        """Wait for the thread, after `stop`. Its last answer may need locks, so the caller must hold none."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def completed(self, job: Job) -> Job:
        """Return the job with the costs of copies and hooks in its profiles, as far as they are known by now."""
        costs = self.costs.now(job.anchors[0].profile)
        anchors = (
            Anchor(anchor.sizes, replace(anchor.profile, link=costs.link, hooks=costs.hooks)) for anchor in job.anchors
        )
        return replace(job, anchors=tuple(anchors))


def _serve(
    jobs: JobQueue,
    process: _PlanningProcess,
    worker: weakref.ref[PlanningWorker],
) -> None:
    """Do jobs until the worker stops or is gone."""
    try:
        while True:
            try:
                waiting = jobs.next(IDLE_S)
            except queue.Empty:
                process.let_go()
                if worker() is None:
                    return
                continue
            owner = worker()
            if waiting is None or owner is None:
                return
            begin_s = time.monotonic()
            answer = _answer(owner, process, waiting.job)
            owner.busy_s += time.monotonic() - begin_s
            del owner
            if answer is not None:
                waiting.done(answer)
            del waiting  # not until the next one has come
    finally:
        process.let_go()
        owner = worker()
        if owner is not None:
            owner.costs.close()


def _answer(owner: PlanningWorker, process: _PlanningProcess, job: Job | None) -> Answer | None:
    """Return the answer to a job; None if there is no job, only a process to be started, or if planning has ended."""
    try:
        process.start()
        if job is None:
            return None
        return process.asked(owner.completed(job))
    except PoochError as error:
        process.let_go()
        return None if process.is_ended else Answer(None, refusal=str(error))


def _ignored(_: Answer) -> None:
    """Do nothing with an answer."""


def _nothing() -> None:
    """Do nothing."""


class _PlanningProcess:
    """The child process, which is started for the first job, and again after it has ended. One thread speaks to it."""

    def __init__(self) -> None:
        self._process: Child | None = None
        self._changing = threading.Lock()
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """Whether it is not started again."""
        return self._is_ended

    def start(self) -> Child:
        """Return the process, started if it is not running.

        Raises:
            PoochError: If it was ended for good, or there can be no such process.
        """
        with self._changing:
            if self._is_ended:
                raise PoochError("planning has ended")
            if self._process is None:
                self._process = Child(f"{__package__}.planning_process")
            return self._process

    def asked(self, job: Job) -> Answer:
        """Return its answer to a job.

        Raises:
            PoochError: If it ends without one, or fails.
        """
        process = self.start()
        try:
            process.tell({"job": WIRE.plain(job)})
            answer: Answer = WIRE.made(process.answer(silent)["done"])
        except PoochError as error:
            raise PoochError(f"planning failed: {error}") from error
        return answer

    def kill(self, *, for_good: bool = False) -> None:
        """End the process, from any thread. Who waits for its answer meets the end of its output."""
        with self._changing:
            self._is_ended = self._is_ended or for_good
            if self._process is not None:
                self._process.kill()

    def let_go(self) -> None:
        """End the process and close its pipes, in the thread that speaks to it."""
        with self._changing:
            process, self._process = self._process, None
        if process is not None:
            process.close()
