"""The steps that were met, and how each kind of them is run: in-core, under its plan, or online."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from ..api.options import PlanOptions
from ..executor.table import ActionTable
from ..ir import Link, Plan, Profile
from ..units import format_bytes
from .cache import Cached, PlanCache
from .jobs import Anchor, Answer, Job
from .signature import StepKey
from .summary import PlannedShape
from .worker import PlanningWorker

Decision = Literal["in-core", "plan", "online", "record"]

MOST_RECORDED = 3  # shapes of one family that are recorded without further reason
MOST_FAILURES = 3  # steps in a row that left their plan, after which the step is recorded again
OFTEN = 3  # steps of a shape that cannot be derived, after which it is recorded
PLANNED_SHARE = 0.995  # of the budget: a step is not repeated to the byte where values decide what it computes
COPIED_STEPS = 50  # after which it is looked again whether replaying is worth its cost
_NEVER = 2**62
NOT_MEASURED = Link("not measured yet", 0.01, 0.01, 1e6, 1e6)


@dataclass
class Known:
    """What is known about one kind of step.

    Attributes:
        profile: Its profile, or None.
        origin: "recorded", "derived" from other shapes, "cached", or "unknown".
        calls: Number of calls of governed modules in the recorded step; 0 if it was derived.
        plan: Its plan, or None.
        table: The plan, indexed.
        minimum_bytes: The smallest budget for which there is a plan, if one was refused.
        is_pending: Whether an answer is on its way.
        is_improved: Whether its plan was or is being searched for longer.
        cannot_derive: Whether its profile cannot be derived from other shapes.
        never_recorded: Whether it cannot be recorded either.
        failed_records: Number of times that recording it failed.
        steps: Number of steps.
        left_plan: Number of steps in a row that left the plan.
        reason: Why it is not planned, for the reader of the summary.
        decision: How the last step was run.
    """

    profile: Profile | None = None
    origin: str = "unknown"
    calls: int = 0
    plan: Plan | None = None
    table: ActionTable | None = None
    minimum_bytes: int = 0
    is_pending: bool = False
    is_improved: bool = False
    cannot_derive: bool = False
    never_recorded: bool = False
    failed_records: int = 0
    steps: int = 0
    left_plan: int = 0
    reason: str = ""
    decision: Decision = "online"


@dataclass
class _Family:
    """Steps that differ in sizes alone.

    Attributes:
        recording: Number of shapes that were or are being recorded.
        recorded: The recorded ones.
        copied_steps: Number of online steps that are still to come in which nothing is replayed.
    """

    recording: int = 0
    copied_steps: int = 0
    recorded: dict[tuple[int, ...], Profile] = field(default_factory=dict)


class Library:
    """Plans by the key of a step. New plans arrive from a worker, and are taken when a step begins.

    Args:
        options: How to plan.
        tell: Called with one line for each new plan.
        estimate: Returns the cost of copies as seen so far.
        measure: Completes a profile with the costs of the device, or None if a child process does so.
        cache: Keeps profiles and plans for the next run, or None.
    """

    def __init__(
        self,
        options: PlanOptions,
        tell: Callable[[str], None],
        estimate: Callable[[], Link],
        measure: Callable[[Profile], Profile] | None = None,
        cache: PlanCache | None = None,
    ) -> None:
        self._options, self._tell = options, tell
        self._cache = cache
        self._known: dict[StepKey, Known] = {}
        self._families: dict[tuple[object, ...], _Family] = {}
        self._worker = PlanningWorker(estimate, measure)
        self._answers: list[tuple[StepKey, Known, Answer]] = []
        self._lock = threading.Lock()
        self._budget_bytes = 0
        self._is_warm = False  # whether a step was run
        self._fresh: list[StepKey] = []  # recorded, and not looked at since
        self.events: list[str] = []

    # When a step begins -----------------------------------------------------------------------------------------------

    def choose(self, key: StepKey, start_bytes: int, budget_bytes: int | None) -> tuple[Decision, Known]:
        """Decide how to run a step.

        Args:
            key: Its key.
            start_bytes: Bytes that are live before it.
            budget_bytes: The budget, or None if it is not known yet.
        """
        if budget_bytes is not None:
            self._budget_bytes = budget_bytes
        self._take_answers()
        if budget_bytes is not None:
            self._plan_ahead(start_bytes, budget_bytes)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._found(key)
        known.steps += 1
        known.decision = self._decision(key, known, start_bytes, budget_bytes)
        if known.decision == "record":
            self._worker.warm_up()
        return known.decision, known

    def replays(self, key: StepKey) -> bool:
        """Whether an online step of a key that begins now records its ops, so that values can be replayed."""
        family = self._families[key.family]
        if family.copied_steps == 0:
            return True
        family.copied_steps -= 1
        return False

    def is_faster_copied(self, key: StepKey) -> None:
        """Note that recording the ops of an online step took longer than its replays gained over copies."""
        self._families[key.family].copied_steps = COPIED_STEPS

    def _decision(self, key: StepKey, known: Known, start_bytes: int, budget_bytes: int | None) -> Decision:
        family = self._families.setdefault(key.family, _Family())
        target_bytes = _target_bytes(known, budget_bytes)
        if known.left_plan >= MOST_FAILURES:
            family.recording += 1
            known.left_plan = 0
            return "record"
        if known.profile is None or budget_bytes is None:
            return self._unknown(key, known, family, start_bytes, target_bytes)
        more_bytes = start_bytes - known.profile.persistent_bytes
        if known.profile.peak_bytes + more_bytes <= target_bytes:
            known.reason = ""
            return "in-core"
        if known.plan is not None and known.plan.predicted_peak_bytes + more_bytes <= target_bytes:
            if known.steps >= OFTEN and not known.is_improved:
                self._improve(key, known)
            return "plan"
        self._request(key, known, [Anchor(key.sizes, known.profile)], start_bytes, target_bytes)
        return "online"

    def _found(self, key: StepKey) -> Known:
        """Return what the cache has of a new kind of step."""
        cached = None if self._cache is None else self._cache.find(key)
        if cached is None:
            return Known()
        if cached.is_recorded:
            family = self._families.setdefault(key.family, _Family())
            family.recorded[key.sizes] = cached.profile
            family.recording += 1
        table = None if cached.plan is None else ActionTable.of(cached.plan)
        origin = "cached" if cached.is_recorded else "cached, derived"
        return Known(cached.profile, origin, plan=cached.plan, table=table, is_improved=True)

    def _keep(self, key: StepKey, known: Known) -> None:
        if self._cache is not None and known.profile is not None:
            self._cache.keep(key, Cached(known.profile, known.plan, known.origin == "recorded"))

    def _plan_ahead(self, start_bytes: int, budget_bytes: int) -> None:
        """Have plans made for steps that were recorded, before they come again. The optimizer's state is there now."""
        fresh, self._fresh = self._fresh, []
        for key in fresh:
            known = self._known[key]
            profile, target_bytes = known.profile, _target_bytes(known, budget_bytes)
            if profile is not None and profile.peak_bytes + start_bytes - profile.persistent_bytes > target_bytes:
                self._request(key, known, [Anchor(key.sizes, profile)], start_bytes, target_bytes)

    def _unknown(self, key: StepKey, known: Known, family: _Family, start_bytes: int, target_bytes: int) -> Decision:
        """Decide how to run a step without a profile."""
        if known.never_recorded:
            return "online"
        if not self._is_warm and target_bytes:
            self._is_warm = True
            return "online"
        if family.recording < MOST_RECORDED or (known.cannot_derive and known.steps >= OFTEN):
            family.recording += 1
            return "record"
        if self._fits_as_larger(key, family, start_bytes, target_bytes):
            return "in-core"
        if family.recorded and not known.cannot_derive:
            anchors = [Anchor(sizes, profile) for sizes, profile in family.recorded.items()]
            self._request(key, known, anchors, start_bytes, target_bytes)
        return "online"

    def _fits_as_larger(self, key: StepKey, family: _Family, start_bytes: int, target_bytes: int) -> bool:
        """Whether a recorded step that is larger in every size would fit."""
        return any(
            profile.peak_bytes - profile.persistent_bytes + start_bytes <= target_bytes
            for sizes, profile in family.recorded.items()
            if all(mine <= other for mine, other in zip(key.sizes, sizes, strict=True))
        )

    def _request(self, key: StepKey, known: Known, anchors: list[Anchor], start_bytes: int, target_bytes: int) -> None:
        if known.is_pending or known.minimum_bytes > target_bytes:
            return
        known.is_pending = True

        def done(answer: Answer) -> None:
            with self._lock:
                self._answers.append((key, known, answer))

        quick = replace(self._options, effort="fast")
        self._worker.plan(Job(key.sizes, tuple(anchors), start_bytes, target_bytes, quick), done)

    def _improve(self, key: StepKey, known: Known) -> None:
        """Have the plan of a step that comes often searched for longer, once nothing else is to be planned."""
        known.is_improved = True
        assert known.profile is not None
        assert known.plan is not None
        profile, plan = known.profile, known.plan

        def done(answer: Answer) -> None:
            if answer.plan is not None and answer.plan.predicted_step_ms < plan.predicted_step_ms:
                with self._lock:
                    self._answers.append((key, known, answer))

        anchor = Anchor(key.sizes, profile)
        job = Job(key.sizes, (anchor,), profile.persistent_bytes, plan.budget_bytes, self._options, plan)
        self._worker.plan(job, done, urgency=1)

    # Answers ----------------------------------------------------------------------------------------------------------

    def _take_answers(self) -> None:
        if not self._answers:
            return
        with self._lock:
            answers, self._answers = self._answers, []
        for key, known, answer in answers:
            known.is_pending = False
            self._take(key, known, answer)

    def _take(self, key: StepKey, known: Known, answer: Answer) -> None:
        known.reason = answer.refusal
        if answer.profile is None:
            known.cannot_derive, known.minimum_bytes = known.profile is None, _NEVER if known.profile else 0
            self._say(f"steps of {key.text} run online: {answer.refusal}")
            return
        if known.profile is None:
            known.profile, known.origin = answer.profile, "derived"
        if answer.plan is not None:
            again = "" if known.plan is None else " again"
            known.profile, known.plan, known.table = answer.profile, answer.plan, ActionTable.of(answer.plan)
            self._say(f"planned{again} for steps of {key.text}: {_described(answer.plan)}")
            self._keep(key, known)
        elif answer.refusal:
            known.minimum_bytes = answer.minimum_bytes or _NEVER
            if known.minimum_bytes <= self._budget_bytes:
                return  # it is asked for again without a reserve
            self._say(f"no plan for steps of {key.text}, so they run online: {answer.refusal}")

    def _say(self, text: str) -> None:
        self.events.append(text)
        self._tell(text)

    # After a step -----------------------------------------------------------------------------------------------------

    def recorded(self, key: StepKey, known: Known, profile: Profile, calls: int) -> None:
        """Take the profile of a step that was recorded.

        The first step of all takes longer than later ones, as libraries load and choose their kernels. It is only
        recorded where its peak has to be known.

        Args:
            key: Its key.
            known: What was known of it.
            profile: The profile.
            calls: Number of calls of governed modules in it.
        """
        if not self._is_warm:  # only its bytes are of use
            self._is_warm = True
            self._families[key.family].recording -= 1
            return
        known.profile, known.origin, known.calls = profile, "recorded", calls
        known.plan = known.table = None
        known.minimum_bytes, known.cannot_derive = 0, False
        self._families[key.family].recorded[key.sizes] = profile
        self._fresh.append(key)

    def cannot_record(self, key: StepKey, known: Known) -> None:
        """Note that a kind of step has no profile, because its backward pass builds a graph of its own."""
        self.not_recorded(key, known)
        known.never_recorded = True
        known.reason = "its backward pass builds a graph of its own (create_graph=True)"

    def not_recorded(self, key: StepKey, known: Known) -> None:
        """Note that a step could not be recorded after all, as when no backward pass followed."""
        self._families[key.family].recording -= 1
        known.failed_records += 1
        known.never_recorded |= known.failed_records >= MOST_FAILURES

    # For the summary --------------------------------------------------------------------------------------------------

    @property
    def is_planning(self) -> bool:
        """Whether any plan is being made."""
        return any(known.is_pending for known in list(self._known.values())) and not self._answers

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """The plans that are in use."""
        self._take_answers()
        return {key: known.plan for key, known in self._known.items() if known.plan is not None}

    def planned(self) -> Iterator[tuple[str, Profile, Plan]]:
        """The shapes, profile and plan of each kind of step that has one; the most frequent first."""
        self._take_answers()
        for key, known in sorted(self._known.items(), key=lambda item: -item[1].steps):
            if known.profile is not None and known.plan is not None:
                yield key.text, known.profile, known.plan

    def shapes(self) -> tuple[PlannedShape, ...]:
        """What is known, for the summary; the most frequent steps first."""
        rows = sorted(self._known.items(), key=lambda item: -item[1].steps)
        return tuple(
            PlannedShape(
                key.text,
                known.origin,
                "online" if known.decision == "record" else known.decision,
                known.steps,
                known.profile.peak_bytes if known.profile else None,
                known.plan.predicted_peak_bytes if known.plan else None,
                _slowdown(known.plan) if known.plan else None,
                known.reason,
            )
            for key, known in rows
        )

    def close(self) -> None:
        """Plan no longer."""
        self._worker.stop()


def _target_bytes(known: Known, budget_bytes: int | None) -> int:
    """Return what a step's plan may take: less than the budget, unless plans are only feasible in all of it."""
    if budget_bytes is None:
        return 0
    target_bytes = int(PLANNED_SHARE * budget_bytes)
    return budget_bytes if target_bytes < known.minimum_bytes <= budget_bytes else target_bytes


def _described(plan: Plan) -> str:
    return (
        f"{format_bytes(plan.predicted_peak_bytes)} instead of {format_bytes(plan.in_core_peak_bytes)}, "
        f"{_slowdown(plan):.2f} of the plain time"
    )


def _slowdown(plan: Plan) -> float:
    return plan.predicted_step_ms / plan.in_core_step_ms
