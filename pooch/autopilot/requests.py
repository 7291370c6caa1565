"""Plans that were asked for, and the answers that have come. The training thread asks and takes, and never waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..api.options import PlanOptions
from ..executor.table import ActionTable
from .cache import Cached, PlanCache
from .costs import CostSource
from .jobs import Anchor, Answer, Job
from .known import Known
from .signature import StepKey
from .worker import PlanningWorker


@dataclass(frozen=True, slots=True)
class Arrival:
    """An answer, and all that the training thread needs in order to follow its plan at once.

    Attributes:
        key: What was asked for.
        known: What was known of it.
        answer: The answer.
        table: Its plan, indexed; None without a plan.
    """

    key: StepKey
    known: Known
    answer: Answer
    table: ActionTable | None


class PlanRequests:
    """Has plans made beside training.

    Args:
        options: How to plan.
        costs: What copies and hooks cost on this machine.
        cache: Keeps profiles and plans for the next run, or None.
    """

    def __init__(self, options: PlanOptions, costs: CostSource, cache: PlanCache | None) -> None:
        self._options, self._costs, self._cache = options, costs, cache
        self._worker = PlanningWorker(costs)
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Get ready, since a plan will be asked for soon."""
        self._worker.warm_up()

    def ask(
        self,
        key: StepKey,
        known: Known,
        anchors: Sequence[Anchor],
        start_bytes: int,
        target_bytes: int,
        held_bytes: int | None = None,
    ) -> None:
        """Ask for a plan, unless one is on its way or there is none within these bytes.

        Args:
            key: The kind of step.
            known: What is known of it.
            anchors: Its own record, or records of other shapes.
            start_bytes: Bytes that are live before the step.
            target_bytes: What the step may take.
            held_bytes: What is held beneath a plan that needs more, if one may be followed. None: none may.
        """
        if known.is_pending or known.minimum_bytes > target_bytes:
            return
        known.is_pending = True
        self._costs.prepare(target_bytes - start_bytes)
        options = replace(self._options, effort="fast")
        job = Job(key.sizes, tuple(anchors), start_bytes, target_bytes, options, held_bytes=held_bytes)
        self._worker.plan(job, lambda answer: self._arrived(key, known, job, answer), dropped=known.is_not_planned)

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
        anchors = (Anchor(key.sizes, profile),)
        job = Job(key.sizes, anchors, profile.persistent_bytes, plan.budget_bytes, self._options, plan, held_bytes)
        step_ms = known.predicted_step_ms

        def done(answer: Answer) -> None:
            if answer.plan is not None and answer.plan.predicted_step_ms + answer.moving_ms < step_ms:
                self._arrived(key, known, job, answer)

        self._worker.plan(job, done, urgency=1, dropped=known.is_not_improved)

    def _arrived(self, key: StepKey, known: Known, job: Job, answer: Answer) -> None:
        """Take an answer, in the worker's thread."""
        table = None if answer.plan is None else ActionTable.of(answer.plan)
        with self._lock:
            self._arrivals.append(Arrival(key, known, answer, table))
        if self._cache is not None and answer.profile is not None and answer.plan is not None:
            is_recorded = key.sizes in (anchor.sizes for anchor in job.anchors) and "derived" not in known.origin
            self._cache.keep(key, Cached(answer.profile, answer.plan, is_recorded))

    def arrivals(self) -> list[Arrival]:
        """Return the answers that have come since the last call."""
        if not self._arrivals:
            return []
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    @property
    def have_come(self) -> bool:
        """Whether there are answers to be taken."""
        return bool(self._arrivals)

    @property
    def planning_s(self) -> float:
        """Time for which was planned, and measured what planning needs, beside training."""
        return self._worker.busy_s

    def close(self) -> None:
        """Plan no longer."""
        self._worker.stop()

    def join(self) -> None:
        """Wait until nothing of planning is left, after `close`."""
        self._worker.join()
