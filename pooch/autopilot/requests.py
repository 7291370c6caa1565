"""Plans that are made beside training. The training thread asks and takes, and never waits.

One thread waits for the child process that plans, so that no step waits for a plan.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..analysis.interpolation import KnownStep
from ..api.children import Child
from ..api.options import PlanOptions
from ..executor.table import ActionTable
from ..ground.errors import PoochError
from .cache import Cached, PlanCache
from .costs import CostSource
from .jobs import Answer, Job, completed
from .known import NOTHING_AWAY, Away, Known
from .signature import StepKey
from .waiting import JobQueue, Request

IDLE_S = 60.0  # after which the planning process ends; the next request starts another


@dataclass(frozen=True, slots=True)
class Arrival:
    """An answer, and all that the training thread needs in order to follow its plan at once.

    Attributes:
        request: What was asked for.
        answer: The answer.
        table: Its plan, indexed; None without a plan.
        is_provisional: Whether it was still being measured what copies and hooks cost.
        has_hooks: Whether it was known what hooks cost, at least as they were measured before this run.
    """

    request: Request
    answer: Answer
    table: ActionTable | None
    is_provisional: bool = False
    has_hooks: bool = True


class PlanRequests:
    """Has plans made in a child process, one after the other; urgent ones first. Its thread ends with the process.

    Args:
        options: How to plan.
        costs: What copies and hooks cost on this machine. Closed with the thread.
        cache: Keeps profiles and plans for the next run, or None.

    Attributes:
        have_come: Whether there are answers to be taken.
        planning_s: Time for which was planned, and measured what planning needs, beside training.
    """

    def __init__(self, options: PlanOptions, costs: CostSource, cache: PlanCache | None) -> None:
        self._options, self._costs, self._cache = options, costs, cache
        self._waiting = JobQueue()
        self._child = Child("plan beside training")
        self._thread: threading.Thread | None = None
        self._arrivals: list[Arrival] = []
        self.have_come = False
        self._lock = threading.Lock()
        self.planning_s = 0.0

    @property
    def knows_costs(self) -> bool:
        """Whether a plan that is asked for now knows what copies and hooks cost, as far as that will ever be known."""
        return self._costs.is_final

    def warm_up(self) -> None:
        """Start the process, which takes a while, since a plan will be asked for soon."""
        self._waiting.wake()
        self._begin()

    def ask(
        self,
        key: StepKey,
        known: Known,
        anchors: Sequence[KnownStep],
        start_bytes: int,
        target_bytes: int,
        held_bytes: int | None = None,
        away: Away = NOTHING_AWAY,
    ) -> None:
        """Ask for a plan, unless one is on its way or there is none within these bytes.

        Args:
            key: The kind of step.
            known: What is known of it.
            anchors: Its own record, or records of other shapes.
            start_bytes: Bytes that are live before the step.
            target_bytes: What the step may take.
            held_bytes: What is held beneath a plan that needs more, if one may be followed. None: none may.
            away: What is not there. The optimizers' state may be, if the plan leaves room for it.
        """
        if known.is_pending or known.minimum_bytes > target_bytes:
            return
        known.is_pending, known.asked_bytes = True, target_bytes
        self._costs.prepare(target_bytes - start_bytes)
        options = replace(self._options, effort="fast")
        job = Job(
            key.sizes,
            tuple(anchors),
            start_bytes,
            target_bytes,
            options,
            held_bytes=held_bytes,
            away_bytes=away.state_bytes,
        )
        self._put(Request(key, known, job, away_bytes=away.all_bytes))

    def ask_for_better(self, key: StepKey, known: Known, held_bytes: int | None = None) -> None:
        """Have a plan searched for longer, once nothing else is to be planned. Only a better one is an answer.

        Args:
            key: The kind of step.
            known: What is known of it.
            held_bytes: What is held beneath a plan that needs more, if one may be followed. None: none may.
        """
        profile, plan = known.profile, known.plan
        assert profile is not None
        assert plan is not None
        anchors = (KnownStep(key.sizes, profile),)
        job = Job(key.sizes, anchors, profile.persistent_bytes, plan.budget_bytes, self._options, plan, held_bytes)
        self._put(Request(key, known, job, known.predicted_step_ms, known.away_bytes, known.staying_bytes))

    def _put(self, request: Request) -> None:
        self._waiting.put(request)
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            arguments = (self._waiting, self._child, self._costs, weakref.ref(self))
            self._thread = threading.Thread(target=_serve, args=arguments, name="pooch-planning", daemon=True)
            self._thread.start()

    def arrivals(self) -> list[Arrival]:
        """Return the answers that have come since the last call."""
        if not self._arrivals:
            return []
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            self.have_come = False
        return arrivals

    def close(self) -> None:
        """End the process, and have the thread end. A request that is being served is not answered."""
        self._waiting.stop()
        self._child.end()

    def join(self) -> None:
        """Wait for the thread, after `close`. Its last answer may need locks, so the caller must hold none."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # In the thread of its own -----------------------------------------------------------------------------------------

    def serve(self, request: Request | None) -> None:
        """Start the process, and have it do what was asked for, if anything was."""
        begin_s, is_provisional, has_hooks = time.monotonic(), not self.knows_costs, self._costs.has_hooks
        answer: Answer | None = None
        try:
            self._child.start()
            if request is not None:
                job = self._with_costs(request.job)
                answer = completed(job, self._child.ask(job))
        except PoochError as error:
            self._child.let_go()
            answer = Answer(None, refusal=f"planning failed: {error}")
        except Exception as error:  # noqa: BLE001 - without an answer, nothing would be planned any more, and no line say so
            self._child.let_go()
            answer = Answer(None, refusal=f"planning failed: {type(error).__name__}: {error}")
        self.planning_s += time.monotonic() - begin_s
        if request is not None and answer is not None and not self._waiting.is_stopped:
            self.arrived(request, answer, is_provisional=is_provisional, has_hooks=has_hooks)
            self._costs.begin()

    def _with_costs(self, job: Job) -> Job:
        """Return a job with the costs of copies and hooks in its profiles, as far as they are known by now."""
        costs = self._costs.now(job.anchors[0].profile)
        anchors = (
            replace(anchor, profile=replace(anchor.profile, link=costs.link, hooks=costs.hooks))
            for anchor in job.anchors
        )
        return replace(job, anchors=tuple(anchors))

    def arrived(
        self, request: Request, answer: Answer, *, is_provisional: bool = False, has_hooks: bool = True
    ) -> None:
        """Take an answer, if it is of use; arguments as of `Arrival`."""
        if not request.is_of_use(answer):
            return
        key, known, job = request.key, request.known, request.job
        table = None if answer.plan is None else ActionTable.of(answer.plan)
        with self._lock:
            self._arrivals.append(Arrival(request, answer, table, is_provisional, has_hooks))
            self.have_come = True
        if self._cache is not None and answer.profile is not None and answer.plan is not None:
            is_recorded = key.sizes in (anchor.shapes for anchor in job.anchors) and "derived" not in known.origin
            self._cache.keep(key, Cached(answer.profile, answer.plan, is_recorded))


def _serve(waiting: JobQueue, child: Child, costs: CostSource, requests: weakref.ref[PlanRequests]) -> None:
    """Serve requests until they are stopped, or nobody is there who could take an answer."""
    try:
        while True:
            try:
                request = waiting.next(IDLE_S)
            except queue.Empty:
                child.let_go()
                if requests() is None:
                    return
                continue
            owner = requests()
            if waiting.is_stopped or owner is None:
                return
            owner.serve(request)
            del owner, request  # not until the next one has come
    finally:
        child.let_go()
        costs.close()
