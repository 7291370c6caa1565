"""What the planning process is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..analysis.interpolation import KnownStep, interpolated_profile
from ..api.options import PlanOptions
from ..api.planning import plan_here
from ..api.pressing import plan_under_pressure
from ..api.wire import WIRE
from ..ground.errors import InfeasibleBudget, PoochError
from ..ground.progress import PlanningProgress
from ..ir import Plan, Profile


@dataclass(frozen=True, slots=True)
class Job:
    """A step to plan.

    Attributes:
        sizes: All sizes of its key.
        anchors: Its own record alone, or records of other shapes that its profile is derived from.
        persistent_bytes: Bytes that are live before it.
        budget_bytes: The budget.
        options: How to plan.
        known: A plan of the same job, to be improved, or None.
        held_bytes: What is held beneath a plan, so that one may be followed that needs more. None: it may not.
    """

    sizes: tuple[int, ...]
    anchors: tuple[KnownStep, ...]
    persistent_bytes: int
    budget_bytes: int
    options: PlanOptions
    known: Plan | None = None
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a job.

    Attributes:
        profile: The profile that was planned, or None if it could not be derived.
        plan: The plan, or None if the step fits in-core, or if there is none.
        minimum_bytes: The smallest budget for which there is a plan, if that is more than the job's, or what is held.
        refusal: Why there is no profile or no plan, in one line, or "".
        moving_ms: What a step on the plan takes longer than it predicts, as the plan needs more than what is held.
        over_bytes: By how much it may pass what is held all the same, as a step without a plan may too.
        is_of_job: Whether the profile is the step's own record, which whoever asks has: it is not told.
    """

    profile: Profile | None
    plan: Plan | None = None
    minimum_bytes: int = 0
    refusal: str = ""
    moving_ms: float = 0.0
    over_bytes: int = 0
    is_of_job: bool = False


WIRE.add(KnownStep, Job, Answer)


def answered(job: Job, progress: PlanningProgress | None = None) -> Answer:
    """Do a job in a child process, and leave out of the answer what the other process has: `completed` puts it back.

    Reading a large profile takes the interpreter there from the training thread.
    """
    answer = done(job, progress)
    return answer if own_record(job) is None else replace(answer, profile=None, is_of_job=True)


def completed(job: Job, answer: Answer) -> Answer:
    """Return what `done` would have returned, of the answer of a child process."""
    return replace(answer, profile=own_record(job), is_of_job=False) if answer.is_of_job else answer


def done(job: Job, progress: PlanningProgress | None = None) -> Answer:
    """Do a job, in this process."""
    profile, uncertain_bytes, refusal = _profile_of(job)
    if profile is None:
        return Answer(None, refusal=refusal)
    target_bytes = job.budget_bytes - uncertain_bytes
    if profile.peak_bytes <= target_bytes:
        return Answer(profile)
    known = () if job.known is None else (job.known,)
    try:
        plan = plan_here(profile, target_bytes, job.options, known=known, progress=progress)
        return _held(job, profile, plan, uncertain_bytes)
    except InfeasibleBudget as error:
        least_bytes = error.minimum_bytes
        refused = Answer(profile, None, least_bytes + uncertain_bytes, str(error))
    except PoochError as error:
        return Answer(profile, refusal=str(error))
    if job.held_bytes is None or refused.minimum_bytes <= job.held_bytes:
        return refused
    try:
        plan = plan_here(profile, least_bytes, job.options, known=(), progress=progress)
        found = _held(job, profile, plan, uncertain_bytes)
    except PoochError:
        return refused
    return refused if found.plan is None else replace(found, refusal=refused.refusal)


def _held(job: Job, profile: Profile, plan: Plan, uncertain_bytes: int) -> Answer:
    """Answer with a plan. One that needs more than what is held beneath it is made to be followed under that."""
    if job.held_bytes is None or plan.budget_bytes + uncertain_bytes <= job.held_bytes:
        return Answer(profile, plan)
    found = plan_under_pressure(profile, plan, job.held_bytes - uncertain_bytes, job.options)
    if found is None:
        return Answer(profile)
    needed_bytes = found.plan.budget_bytes + uncertain_bytes
    return Answer(profile, found.plan, needed_bytes, moving_ms=found.moving_ms, over_bytes=found.over_bytes)


def _profile_of(job: Job) -> tuple[Profile | None, int, str]:
    own = own_record(job)
    if own is not None:
        return own, 0, ""
    known = [replace(each, profile=with_persistent(each.profile, job.persistent_bytes)) for each in job.anchors]
    found = interpolated_profile(known, job.sizes)
    return found.profile, found.uncertain_bytes, found.reason


def own_record(job: Job) -> Profile | None:
    """Return the profile of a step that was recorded itself, with the bytes that are live before it now."""
    for anchor in job.anchors:
        if anchor.shapes == job.sizes:
            return with_persistent(anchor.profile, job.persistent_bytes)
    return None


def with_persistent(profile: Profile, persistent_bytes: int) -> Profile:
    """Return the profile of the same step with other bytes alive before it, such as a state that appeared since."""
    more = persistent_bytes - profile.persistent_bytes
    if not more:
        return profile if profile.split is None else replace(profile, split=None)
    ops = tuple(replace(op, entry_bytes=op.entry_bytes + more, peak_bytes=op.peak_bytes + more) for op in profile.ops)
    peak_bytes = profile.peak_bytes + more
    return replace(profile, ops=ops, persistent_bytes=persistent_bytes, peak_bytes=peak_bytes, split=None)
