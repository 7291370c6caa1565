"""Planning beside training: one thread that waits for child processes, so that no step waits for a plan."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..api.children import child_environment
from ..errors import PoochError
from ..ir import HookCosts, Link, Profile
from .jobs import Anchor, Answer, Job, answer_loaded, saved

_STOP = -1
IDLE_S = 60.0  # after which the planning process ends; the next job starts another


@dataclass(frozen=True, slots=True)
class _Costs:
    """What copies and hooks cost on this machine."""

    link: Link
    hooks: HookCosts


class PlanningWorker:
    """Makes plans in a child process, one after the other; urgent jobs first. Its thread ends with the process.

    Args:
        estimate: Returns the cost of copies as seen in training. It serves until a child process of low priority has
            measured what copies and hooks cost.
        measure: Completes a profile with the costs of this machine's device, in this process. None: a child process
            does so.
    """

    def __init__(self, estimate: Callable[[], Link], measure: Callable[[Profile], Profile] | None = None) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None, Callable[[Answer], None]]] = queue.PriorityQueue()
        self._count = 0
        self._estimate, self._measure = estimate, measure
        self._costs: _Costs | None = None
        self._measuring: tuple[subprocess.Popen[bytes], Path] | None = None
        self._folder: TemporaryDirectory[str] | None = None
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
        costs = self._costs or self._measured(job.anchors[0].profile)
        anchors = (
            Anchor(anchor.sizes, replace(anchor.profile, link=costs.link, hooks=costs.hooks)) for anchor in job.anchors
        )
        return replace(job, anchors=tuple(anchors))

    def _measured(self, profile: Profile) -> _Costs:
        if self._measure is not None:
            done = self._measure(profile)
            self._costs = _Costs(done.link, done.hooks)
            return self._costs
        if self._measuring is None:
            self._folder = TemporaryDirectory(prefix="pooch-")
            path = Path(self._folder.name) / "measured.json"
            profile.save(path)
            command = [sys.executable, "-m", f"{__package__}.measuring_process", str(path)]
            quiet = subprocess.DEVNULL
            child = subprocess.Popen(command, env=child_environment(), stdin=quiet, stdout=quiet, stderr=quiet)
            self._measuring = child, path
        child, path = self._measuring
        if child.poll() == 0:
            done = Profile.load(path)
            self._costs = _Costs(done.link, done.hooks)
            return self._costs
        return _Costs(self._estimate(), profile.hooks)

    def end_measuring(self) -> None:
        """End the process that measures, if it is still running."""
        if self._measuring is not None:
            self._measuring[0].kill()
            self._measuring[0].wait()
        if self._folder is not None:
            self._folder.cleanup()


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
            owner.end_measuring()


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
