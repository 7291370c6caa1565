"""What goes into planning and what comes out of it; the stages after it come in as an injected evaluator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pooch.analysis.dataflow import Dataflow
from pooch.ir.plan import Choice, Decision, Decisions
from pooch.ir.schedule import Schedule
from pooch.ir.timeline import Timeline

Status = Literal["optimal", "feasible", "heuristic", "manual"]
Progress = Callable[[str, float], None]  # what is being done, and which share of the planning is done (0 to 1)

INTERRUPTED = "interrupted: this is the best plan found so far"
OPTIMAL_GAP = 0.01  # a plan whose gap is at most this is called optimal


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What decisions come to: the schedule that they are lowered to, and its simulation."""

    schedule: Schedule
    timeline: Timeline


class Evaluator(Protocol):
    """Lowering and simulation, injected so that the planner imports neither."""

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        """Lower the decisions for the budget and simulate them.

        Decisions that do not fit are no error: they come back with `timeline.peak_bytes` over the budget.
        """
        ...

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail: for policies that time copies themselves, or look at single stalls."""
        ...

    def time_ms(self, schedule: Schedule) -> float:
        """The simulated time of a schedule, and nothing else."""
        ...


@dataclass(frozen=True, slots=True)
class PlanningRequest:
    """The inputs of every policy.

    Attributes:
        dataflow: the profile and what follows from it. evaluator: lowering and simulation.
        budget_bytes: of device memory, everything included. host_budget_bytes: of the swap tier, None = unlimited.
        time_limit_s: a safety: policies limit themselves by counts, so that the same inputs give the same plan.
        progress: called with a text and the share that is done.
        started_s: when planning began, on the monotonic clock.
        known: plans made before, such as those under smaller budgets: `ilp` is never slower than those that fit.
        ends_s: when all of planning has to end, for a request that is a part of another one.
    """

    dataflow: Dataflow
    budget_bytes: int
    evaluator: Evaluator
    host_budget_bytes: int | None = None
    time_limit_s: float = 30.0
    progress: Progress | None = None
    started_s: float = field(default_factory=time.monotonic)
    known: tuple[PolicyOutcome, ...] = ()
    ends_s: float = math.inf

    @property
    def deadline_s(self) -> float:
        """When the time limit is reached, on the monotonic clock."""
        return min(self.started_s + self.time_limit_s, self.ends_s)

    def remaining_s(self) -> float:
        """Seconds until the time limit, not below zero."""
        return max(0.0, self.deadline_s - time.monotonic())

    def used_share(self) -> float:
        """Share of the request's own time limit that is used up."""
        return (time.monotonic() - self.started_s) / self.time_limit_s

    def report(self, text: str, share: float) -> None:
        """Tell the listener, if there is one, how far planning is."""
        if self.progress is not None:
            self.progress(text, share)


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """The outputs of every policy.

    Attributes:
        decisions: one choice per activation. evaluation: of exactly these decisions.
        lower_bound_ms: no plan under the budget is faster in the simulator's model.
        proven: the bound comes from the program (else the plan is a cheap policy's: status "heuristic").
        notes: what happened on the way. interrupted: somebody pressed Ctrl-C.
    """

    decisions: dict[int, Choice]
    evaluation: Evaluation
    lower_bound_ms: float
    proven: bool = False
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def step_ms(self) -> float:
        """Simulated duration."""
        return self.evaluation.timeline.step_ms

    def or_faster(self, other: PolicyOutcome) -> PolicyOutcome:
        """This one, or the other's plan under this one's bound where that plan is faster."""
        better = self
        if other.step_ms < self.step_ms:
            better = replace(self, decisions=other.decisions, evaluation=other.evaluation)
        return better.stopped() if other.interrupted else better

    def with_note(self, note: str) -> PolicyOutcome:
        """The same, and what happened besides."""
        return replace(self, notes=(*self.notes, note))

    def stopped(self) -> PolicyOutcome:
        """The same after a Ctrl-C."""
        return replace(self.with_note(INTERRUPTED), interrupted=True)


@dataclass(frozen=True, slots=True)
class PlannedDecisions:
    """A plan before it is packed into a `Plan`: decisions, why, and how good they are.

    Attributes:
        decisions: one choice per activation of the region. schedule, timeline: what they come to.
        lower_bound_ms: no plan under the budget is faster in the simulator's model.
        gap: (step - lower bound) / step.
        status: "optimal" (gap at most 1%), "feasible", or "heuristic" (a cheap policy's plan).
        notes: what happened on the way. rows: one `Decision` per activation, in forward order.
        planning_ms: wall time spent.
    """

    decisions: dict[int, Choice]
    schedule: Schedule
    timeline: Timeline
    lower_bound_ms: float
    gap: float
    status: Status
    notes: tuple[str, ...]
    rows: tuple[Decision, ...]
    planning_ms: float

    @property
    def outcome(self) -> PolicyOutcome:
        """The plan as others can know it."""
        return PolicyOutcome(self.decisions, Evaluation(self.schedule, self.timeline), self.lower_bound_ms)


Policy = Callable[[PlanningRequest], PolicyOutcome]
