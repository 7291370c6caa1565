"""What the planning process is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..analysis.interpolation import KnownStep, interpolated_profile
from ..api.options import PlanOptions
from ..api.planning import plan_here
from ..api.wire import WIRE
from ..errors import InfeasibleBudget, PoochError
from ..ir import Plan, Profile
from ..progress import PlanningProgress


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
    """

    sizes: tuple[int, ...]
    anchors: tuple[KnownStep, ...]
    persistent_bytes: int
    budget_bytes: int
    options: PlanOptions
    known: Plan | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a job.

    Attributes:
        profile: The profile that was planned, or None if it could not be derived.
        plan: The plan, or None if the step fits in-core, or if there is none.
        minimum_bytes: The smallest budget, if there is no plan for that reason.
        refusal: Why there is no profile or no plan, in one line, or "".
    """

    profile: Profile | None
    plan: Plan | None = None
    minimum_bytes: int = 0
    refusal: str = ""


WIRE.add(KnownStep, Job, Answer)


def done(job: Job, progress: PlanningProgress | None = None) -> Answer:
    """Do a job, in this process."""
    profile, uncertain_bytes, refusal = _profile_of(job)
    if profile is None:
        return Answer(None, refusal=refusal)
    target_bytes = job.budget_bytes - uncertain_bytes
    if profile.peak_bytes <= target_bytes:
        return Answer(profile)
    try:
        known = () if job.known is None else (job.known,)
        plan = plan_here(profile, target_bytes, job.options, known=known, progress=progress)
    except InfeasibleBudget as error:
        return Answer(profile, None, error.minimum_bytes + uncertain_bytes, str(error))
    except PoochError as error:
        return Answer(profile, refusal=str(error))
    return Answer(profile, plan)


def _profile_of(job: Job) -> tuple[Profile | None, int, str]:
    known = [replace(each, profile=with_persistent(each.profile, job.persistent_bytes)) for each in job.anchors]
    for anchor in known:
        if anchor.shapes == job.sizes:
            return anchor.profile, 0, ""
    found = interpolated_profile(known, job.sizes)
    return found.profile, found.uncertain_bytes, found.reason


def with_persistent(profile: Profile, persistent_bytes: int) -> Profile:
    """Return the profile of the same step with other bytes alive before it, such as a state that appeared since."""
    more = persistent_bytes - profile.persistent_bytes
    ops = tuple(replace(op, entry_bytes=op.entry_bytes + more, peak_bytes=op.peak_bytes + more) for op in profile.ops)
    peak_bytes = profile.peak_bytes + more
    return replace(profile, ops=ops, persistent_bytes=persistent_bytes, peak_bytes=peak_bytes, split=None)
