"""What is known about each kind of step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from operator import ge
from statistics import median

from ..executor.table import ActionTable
from ..ground.units import format_bytes
from ..ground.wording import slower_than
from ..ir import Plan, Profile
from .differing_ops import DifferingOps, different_ops
from .loop_times import SETTLING_STEPS, Beside
from .online_ways import OnlineWays
from .signature import StepKey
from .summary import Decision, PlannedShape, Told

MOST_RECORDS = 16  # of a family: all of them are sent along when another shape is derived
TRIED_STEPS = 5  # on a plan that needs more than the budget, before its times are compared with those without it
DIFFERED = "a replay of it gave other bits in training"


@dataclass(frozen=True, slots=True)
class Away:
    """What outlives steps and is away as one begins.

    Attributes:
        all_bytes: All of it.
        state_bytes: What of it is the optimizers' state.
    """

    all_bytes: int = 0
    state_bytes: int = 0


NOTHING_AWAY = Away()


@dataclass
class Trial:
    """How steps went without a plan, and on one that needs more than the budget.

    Attributes:
        online_ms: Times of the last ones without a plan.
        online_own_ms: What of these times Pooch took, where that is known.
        online_over_bytes: By how much these passed the budget; 0 or less: they did not.
        planned_ms: Times of those on the plan.
        is_lost: Whether the plan is not followed any longer.
    """

    online_ms: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))
    online_own_ms: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))
    online_over_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))
    planned_ms: list[float] = field(default_factory=list)
    is_lost: bool = False

    @property
    def least_over_bytes(self) -> int:
        """By how much all of the last steps without a plan passed the budget; 0: one held it, or none is known."""
        return max(0, min(self.online_over_bytes, default=0))

    @property
    def least_plain_ms(self) -> float:
        """What the fastest of the last steps without a plan took beside what Pooch did in it; infinity: unknown."""
        times = zip(self.online_ms, self.online_own_ms, strict=False)
        return min((step_ms - own_ms for step_ms, own_ms in times if own_ms < step_ms), default=math.inf)

    def is_slower(self, step_ms: float) -> bool:
        """Take the time of a step on the plan, and return whether the plan has turned out to be slower than none.

        What else the machine does only adds time, so it is slower if even the fastest of its first steps took longer
        than steps without it usually do.
        """
        if len(self.planned_ms) == TRIED_STEPS:
            return False
        self.planned_ms.append(step_ms)
        is_known = len(self.planned_ms) == TRIED_STEPS and bool(self.online_ms)
        return is_known and min(self.planned_ms) > median(self.online_ms)


@dataclass
class Known:
    """What is known about one kind of step.

    Attributes:
        profile: Its profile, or None.
        origin: "recorded", "derived" from other shapes, "cached", or "unknown".
        calls: Number of calls of governed modules in the recorded step; 0 if it was derived.
        away_bytes: What outlives steps and was away as the step of its profile began, which plain training has there.
        plan: Its plan, or None.
        table: The plan, indexed.
        asked_bytes: What a step might take when a plan was asked for last.
        minimum_bytes: The smallest budget for which there is a plan, if one was refused.
        needed_bytes: What its plan needs, if that is more than the budget: what the plan keeps makes up for the rest.
        moving_ms: What a step takes longer for that than its plan predicts.
        staying_bytes: What of the optimizers' state its plan leaves room for.
        trial: What following such a plan is like.
        is_pending: Whether an answer is on its way.
        is_improved: Whether its plan was or is being searched for longer.
        is_outdated: Whether its plan has replays that gave other bits, and is to be made again.
        is_provisional: Whether its plan does not know yet what copies and hooks cost in this run; it is made anew then.
        has_hooks: Whether it knows what hooks cost, at least as they were measured before.
        cannot_derive: Whether its profile cannot be derived from other shapes.
        never_recorded: Whether it cannot be recorded either.
        failed_records: Number of times that recording it failed.
        steps: Number of steps.
        left_plan: Number of steps in a row that left the plan.
        has_any_sizes: Whether sizes within its steps change from one to the next, so that plans are followed whatever
            they are.
        lost_plans: Number of plans in a row that it was recorded anew for, as no step could follow them.
        reason: Why it is not planned, for the reader of the summary.
        decision: How the last step was run.
        has_left: Whether it has left the plan that it was to be run on.
        ops: What tells the ops of its last different steps, but for recorded ones.
        told: What was predicted with all that was known when it was told last, or None.
    """

    profile: Profile | None = None
    origin: str = "unknown"
    calls: int = 0
    away_bytes: int = 0
    plan: Plan | None = None
    table: ActionTable | None = None
    asked_bytes: int = 0
    minimum_bytes: int = 0
    needed_bytes: int = 0
    moving_ms: float = 0.0
    staying_bytes: int = 0
    trial: Trial = field(default_factory=Trial)
    is_pending: bool = False
    is_improved: bool = False
    is_outdated: bool = False
    is_provisional: bool = False
    has_hooks: bool = True
    cannot_derive: bool = False
    never_recorded: bool = False
    failed_records: int = 0
    steps: int = 0
    left_plan: int = 0
    has_any_sizes: bool = False
    lost_plans: int = 0
    reason: str = ""
    decision: Decision = "online"
    has_left: bool = False
    ops: deque[int] = field(default_factory=different_ops)
    told: Told | None = None

    @property
    def predicted_step_ms(self) -> float:
        """The time that a step takes on its plan; 0 without one."""
        return 0.0 if self.plan is None else self.plan.predicted_step_ms + self.moving_ms

    @property
    def lost_ms(self) -> float:
        """What its steps so far have lost on its plan, as predicted."""
        return 0.0 if self.plan is None else self.steps * (self.predicted_step_ms - self.plan.in_core_step_ms)

    @property
    def slowdown(self) -> float | None:
        """What was told last of a step's time over that without Pooch, or None."""
        return None if self.told is None else self.told.slowdown

    def expected(self, decision: Decision, beside: Beside) -> Told | None:
        """Return what is predicted of a step that runs so, given what it takes beside its ops; None: nothing is."""
        if decision == "plan" and self.plan is not None:
            recorded_ms = self.plan.in_core_step_ms
            lost_ms = self.predicted_step_ms - recorded_ms
        elif decision == "in-core" and self.profile is not None:
            recorded_ms, lost_ms = self.profile.step_ms, 0.0
        else:
            return self._expected_online(beside) if decision == "online" else None
        if recorded_ms <= 0:
            return None
        # Ops that are recorded pass through Python, which small ones take longer for than all else of a plain step.
        plain_ms = min(recorded_ms, self.trial.least_plain_ms)
        step_ms = plain_ms + lost_ms + beside.moving_ms
        return Told(plain_ms, step_ms, beside.optimizer_ms, beside.moving_ms, decision)

    def _expected_online(self, beside: Beside) -> Told | None:
        """Return what is predicted of a step without a plan: that it takes what the last ones took.

        What Pooch did not do in these is thought to be what they take without it.
        """
        trial, within_ms = self.trial, beside.within_ms
        is_known = trial.online_own_ms or self.profile is None
        if self.is_pending or not (trial.online_ms and is_known and (beside.moving_ms or self.has_settled)):
            return None
        online_ms = median(trial.online_ms)
        own_ms = median(trial.online_own_ms) if trial.online_own_ms else within_ms
        plain_ms, in_optimizers_ms = online_ms - own_ms, beside.moving_ms - within_ms
        if plain_ms <= 0:
            return None
        return Told(plain_ms, online_ms + in_optimizers_ms, beside.optimizer_ms, own_ms + in_optimizers_ms, "online")

    @property
    def may_be_planned(self) -> bool:
        """Whether there may be a plan for it one day: it was neither refused, nor can it not be recorded."""
        return not (self.minimum_bytes or self.never_recorded)

    @property
    def has_settled(self) -> bool:
        """Whether it ran often without a plan."""
        return self.steps > SETTLING_STEPS and len(self.trial.online_ms) == TRIED_STEPS

    def has_no_plan(self) -> None:
        """Forget its plan, if there is one."""
        self.plan = self.table = None
        self.is_provisional = False
        self.needed_bytes, self.moving_ms, self.staying_bytes, self.told = 0, 0.0, 0, None

    def shape(self, key: StepKey) -> PlannedShape:
        """Return it as the summary shows it."""
        return PlannedShape(
            key.text,
            self.origin,
            "online" if self.decision == "record" else "left" if self.has_left else self.decision,
            self.steps,
            self.profile.peak_bytes + self.away_bytes if self.profile else None,
            self.plan.predicted_peak_bytes + self.staying_bytes if self.plan else None,
            self.slowdown,
            self.reason,
        )


@dataclass
class Family:
    """Steps that differ in sizes alone.

    Attributes:
        recording: Number of shapes that were or are being recorded.
        recorded: The recorded ones that were recorded last.
        is_compiled: Whether compiled graphs run in its steps.
        shapes: Number of its kinds of steps that are remembered.
        ways: How its steps run without a plan.
        ops: Whether their ops differ from one to the next.
        told: Sizes of which what is decided was told.
        is_rest_told: Whether it was told that nothing is told of other sizes.
    """

    recording: int = 0
    is_compiled: bool = False
    shapes: int = 0
    ways: OnlineWays = field(default_factory=OnlineWays)
    ops: DifferingOps = field(default_factory=DifferingOps)
    recorded: dict[tuple[int, ...], Profile] = field(default_factory=dict)
    told: set[tuple[int, ...]] = field(default_factory=set)
    is_rest_told: bool = False

    def add(self, sizes: tuple[int, ...], profile: Profile) -> None:
        """Take the profile of a step that was recorded."""
        self.recorded.pop(sizes, None)
        self.recorded[sizes] = profile
        if len(self.recorded) > MOST_RECORDS:
            self.recorded.pop(next(iter(self.recorded)))

    def smaller_than(self, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the sizes of recorded steps that are no larger in any size."""
        return [others for others in self.recorded if all(map(ge, sizes, others))]

    def has_larger_that_fits(self, sizes: tuple[int, ...], start_bytes: int, target_bytes: int) -> bool:
        """Whether a recorded step that is larger in every size would fit."""
        return any(
            profile.peak_bytes - profile.persistent_bytes + start_bytes <= target_bytes
            for others, profile in self.recorded.items()
            if all(mine <= other for mine, other in zip(sizes, others, strict=True))
        )


def without_replays(profile: Profile, values: Collection[int]) -> Profile:
    """Return a profile in which the ops that make some values cannot be replayed."""
    producers = {profile.values[value].producer for value in values}
    ops = tuple(
        replace(op, refusal=DIFFERED) if slot in producers and op.refusal is None else op
        for slot, op in enumerate(profile.ops)
    )
    return replace(profile, ops=ops)


def described(plan: Plan, slowdown: float | None, staying_bytes: int = 0, away_bytes: int = 0) -> str:
    """Return a plan and the time that a step takes on it in a few words.

    Args:
        plan: The plan.
        slowdown: The time over that without Pooch, or None.
        staying_bytes: What stays of the optimizers' state that was away when it was made.
        away_bytes: All that was away then.
    """
    peak_bytes, in_core_bytes = plan.predicted_peak_bytes + staying_bytes, plan.in_core_peak_bytes + away_bytes
    peaks = f"{format_bytes(peak_bytes)} instead of {format_bytes(in_core_bytes)}"
    return peaks if slowdown is None else f"{peaks}, predicted {slower_than(slowdown, 'without Pooch')}"
