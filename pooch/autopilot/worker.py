"""Planning beside training: one thread that waits for child processes, so that no step waits for a plan."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..api.children import child_environment
from ..errors import PoochError
from .costs import CostSource
from .jobs import Anchor, Answer, Job, answer_loaded, saved

_STOP = -1
IDLE_S = 60.0  # after which the planning process ends; the next job starts another


class PlanningWorker:
    """Makes plans in a child process, one after the other; urgent jobs first. Its thread ends with the process.

    Args:
        costs: What copies and hooks cost. Closed with the thread.
    """

    def __init__(self, costs: CostSource) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None, Callable[[Answer], None]]] = queue.PriorityQueue()
        self._count = 0
        self.costs = costs
        self._thread: threading.Thread | None = None

    def warm_up(self) -> None:
        """Start the process, which takes a while, since a job will come soon."""
        self._put(1, None, _ignored)

    def plan(self, job: Job, done: Callable[[Answer], None], *, urgency: int = 0) -> None:
        """Have a job done, and call `done` with the answer in the worker's thread. A low urgency goes first."""
        self._put(urgency, job, done)

    def _put(self, urgency: int, job: Job | None, done: Callable[[Answer], None]) -> None:
        self._count += 1
        self._jobs.put((urgency, self._count, job, done))
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs, weakref.ref(self)), daemon=True)
            self._thread.name = "pooch-planning"
            self._thread.start()

    def stop(self) -> None:
        """End the thread and the process after the job that is being done."""
        self._jobs.put((_STOP, 0, None, _ignored))

    def completed(self, job: Job) -> Job:
        """Return the job with the costs of copies and hooks in its profiles, as far as they are known by now."""
        costs = self.costs.now(job.anchors[0].profile)
        anchors = (
            Anchor(anchor.sizes, replace(anchor.profile, link=costs.link, hooks=costs.hooks)) for anchor in job.anchors
        )
        return replace(job, anchors=tuple(anchors))


def _serve(
    jobs: queue.PriorityQueue[tuple[int, int, Job | None, Callable[[Answer], None]]],
    worker: weakref.ref[PlanningWorker],
) -> None:
    """Do jobs until the worker stops or is gone."""
    process: subprocess.Popen[str] | None = None
    try:
        while True:
            try:
                urgency, _, job, done = jobs.get(timeout=IDLE_S)
            except queue.Empty:
                _end(process)
                process = None
                if worker() is None:
                    return
                continue
            owner = worker()
            if urgency == _STOP or owner is None:
                return
            process = process or _started()
            if job is None:
                continue
            with TemporaryDirectory(prefix="pooch-") as name:
                try:
                    job = owner.completed(job)
                    answer = _asked(process, job, Path(name))
                except (PoochError, OSError, ValueError) as error:
                    _end(process)
                    process = None
                    answer = Answer(None, refusal=str(error))
            del owner
            done(answer)
    finally:
        _end(process)
        owner = worker()
        if owner is not None:
            owner.costs.close()


def _ignored(_: Answer) -> None:
    """Do nothing with an answer."""


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"{__package__}.planning_process"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=child_environment())


def _asked(process: subprocess.Popen[str], job: Job, folder: Path) -> Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(saved(job, folder)) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise PoochError("the planning process ended without a plan")
    return answer_loaded(folder)


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is not None:
        with process:  # closes its pipes, at which it ends, and waits for that
            pass
