"""What goes into planning and what comes out of it; the stages after it come in as an injected evaluator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ..analysis.dataflow import Dataflow
from ..ground.progress import PlanningProgress
from ..ir.plan import Choice, Decision, Decisions
from ..ir.schedule import Schedule
from ..ir.timeline import OnlineStep, Timeline
from ..machine.eviction import Rule

Effort = Literal["full", "fast"]
Status = Literal["optimal", "feasible", "heuristic"]
MakeRule = Callable[[Dataflow, Callable[[], float]], Rule]  # of the profile and of what tells the time in ms

FITS = "everything fits"
INTERRUPTED = "interrupted: this is the best plan found so far"
OPTIMAL_GAP = 0.01  # a plan whose gap is at most this is called optimal


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The schedule that decisions are lowered to, and its simulation."""

    schedule: Schedule
    timeline: Timeline


class Evaluator(Protocol):
    """Lowering and simulation, injected so that the planner imports neither."""

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        """Lower the decisions for the budget and simulate the schedule.

        Decisions that do not fit are not an error: their `timeline.peak_bytes` is over the budget.
        """
        ...

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail, for policies that time copies or look at single stalls."""
        ...

    def time_ms(self, schedule: Schedule) -> float:
        """Simulate a schedule for its duration only."""
        ...

    def run_online(self, budget_bytes: int, host_budget_bytes: int | None, make_rule: MakeRule | None) -> OnlineStep:
        """Simulate a step that has no plan, and evicts by a rule: Pooch's own, if none is given."""
        ...


@dataclass(frozen=True, slots=True)
class PlanningRequest:
    """The inputs of every policy.

    Attributes:
        dataflow: the profile and what follows from it.
        budget_bytes: device memory, everything included.
        evaluator: lowering and simulation.
        host_budget_bytes: size of the swap tier; None: unlimited.
        time_limit_s: a safety net: policies limit themselves by counts, so that the same inputs give the same plan.
        progress: called with a text and the share that is done.
        started_s: when planning began, on the monotonic clock.
        known: plans made before, such as those for smaller budgets; "ilp" is never slower than those that fit.
        effort: how long to look: "fast" is content with a good plan.
        start: choices to start from, such as those of a plan for another shape; None: none are known.
        ends_s: when all of planning has to end, for a request that is part of another one.
    """

    dataflow: Dataflow
    budget_bytes: int
    evaluator: Evaluator
    host_budget_bytes: int | None = None
    time_limit_s: float = 30.0
    progress: PlanningProgress | None = None
    started_s: float = field(default_factory=time.monotonic)
    known: tuple[PolicyOutcome, ...] = ()
    ends_s: float = math.inf
    effort: Effort = "full"
    start: Decisions | None = None

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

    def has_left(self, share: float) -> bool:
        """Whether more than this share of the time limit is left."""
        return self.remaining_s() > share * self.time_limit_s

    def moment_s(self, share: float) -> float:
        """When this share of the time limit will have passed from now on, or all of it."""
        return min(self.deadline_s, time.monotonic() + share * self.time_limit_s)

    def report(self, text: str, share: float) -> None:
        """Tell the listener, if there is one, how far planning has come."""
        if self.progress is not None:
            self.progress(text, share)


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """A plan: what policies return and, with the last two attributes filled in, what `make_plan` returns.

    Attributes:
        decisions: one choice per activation of the region.
        evaluation: of exactly these decisions.
        lower_bound_ms: no plan under the budget is faster in the simulator's model.
        proven: the bound comes from the integer program.
        notes: what happened on the way.
        interrupted: Ctrl-C was pressed.
        rows: one `Decision` per activation, in forward order.
        planning_ms: wall time spent.
    """

    decisions: dict[int, Choice]
    evaluation: Evaluation
    lower_bound_ms: float
    proven: bool = False
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    rows: tuple[Decision, ...] = ()
    planning_ms: float = 0.0

    @property
    def schedule(self) -> Schedule:
        """What the decisions are lowered to."""
        return self.evaluation.schedule

    @property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return self.evaluation.timeline

    @property
    def step_ms(self) -> float:
        """Simulated duration of the step."""
        return self.timeline.step_ms

    @property
    def gap(self) -> float:
        """Share of the step that a better plan could save at most."""
        return gap_between(self.step_ms, self.lower_bound_ms)

    @property
    def status(self) -> Status:
        """How good the plan is known to be."""
        if self.gap <= OPTIMAL_GAP:
            return "optimal"
        return "feasible" if self.proven else "heuristic"

    def stopped(self) -> PolicyOutcome:
        """The same plan after a Ctrl-C."""
        return replace(self, notes=(*self.notes, INTERRUPTED), interrupted=True)


Policy = Callable[[PlanningRequest], PolicyOutcome]


def gap_between(step_ms: float, lower_bound_ms: float) -> float:
    """Share of the step by which it is over its lower bound; 0 for an empty step."""
    return max(0.0, step_ms - lower_bound_ms) / step_ms if step_ms > 0 else 0.0
