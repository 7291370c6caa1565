"""What the planning process is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter

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
        away_bytes: What of the optimizers' state is not among the persistent bytes, as it is away during the step. The
            plan may leave room for it.
    """

    sizes: tuple[int, ...]
    anchors: tuple[KnownStep, ...]
    persistent_bytes: int
    budget_bytes: int
    options: PlanOptions
    known: Plan | None = None
    held_bytes: int | None = None
    away_bytes: int = 0


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
        staying_bytes: What of the optimizers' state the plan leaves room for, beside what it takes itself.
        is_of_job: Whether the profile is the step's own record, which whoever asks has: it is not told.
    """

    profile: Profile | None
    plan: Plan | None = None
    minimum_bytes: int = 0
    refusal: str = ""
    moving_ms: float = 0.0
    over_bytes: int = 0
    staying_bytes: int = 0
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
    if job.away_bytes and (lean := _with_state_here(job, profile, target_bytes, progress)) is not None:
        return Answer(profile, lean, staying_bytes=min(job.away_bytes, target_bytes - lean.budget_bytes))
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


def _with_state_here(job: Job, profile: Profile, target_bytes: int, progress: PlanningProgress | None) -> Plan | None:
    """Return a plan that leaves room for state of the optimizers, if that costs less than moving that in each step.

    What is moved costs a copy out and one back in, during the optimizer's step, which computes little meanwhile. A plan
    that lets more activations leave copies them beside what is computed, or computes them again. So first all of the
    state is thought to stay, and if there is no plan then, as much as there is one for, and half of that.

    Args:
        job: The job, of which some state is away.
        profile: Its profile.
        target_bytes: What the step may take, with what stays.
        progress: Is told how far planning is.
    """
    link, away_bytes = profile.link, job.away_bytes
    moving_ms_per_byte = 1 / link.out_bytes_per_ms + 1 / link.in_bytes_per_ms
    found: list[tuple[float, Plan]] = []
    ahead_bytes = [away_bytes]
    while ahead_bytes:
        here_bytes = ahead_bytes.pop()
        try:
            plan = plan_here(profile, target_bytes - here_bytes, job.options, known=(), progress=progress)
        except InfeasibleBudget as error:
            most_bytes = target_bytes - error.minimum_bytes
            if here_bytes == away_bytes and most_bytes > 0:
                ahead_bytes += [most_bytes // 2, most_bytes]
            continue
        found.append((plan.predicted_step_ms + moving_ms_per_byte * (away_bytes - here_bytes), plan))
        least_ms = profile.step_ms + moving_ms_per_byte * away_bytes
        if not ahead_bytes and here_bytes and min(found, key=itemgetter(0))[0] > least_ms:
            ahead_bytes.append(0)  # only then a plan without any room for it may take less
    return min(found, key=itemgetter(0))[1] if found else None


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
