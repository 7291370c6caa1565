"""Plans in which also leaves what outlives a step: how the budget is shared between it and the activations.

What outlives the step gets an allowance, and activations are planned in the rest of the budget. Where they leave more,
it has that too. The more it has, the less of it is copied, and the more activations leave; the allowance with the
shortest step is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import occupancy
from ..analysis.persistence import Cycle, Order, Residence, residence, with_resident
from ..ground.errors import InfeasibleBudget
from ..ground.progress import PlanningProgress
from ..ir import Choice, Decisions, PersistentPlan, Profile
from ..planner import Effort, PolicyOutcome
from ..planner.contract import OPTIMAL_GAP
from ..simulator import MovingStep, simulate_moving
from .deciding import decide, request_of
from .evaluation import StageEvaluator
from .hooked import dataflow_of
from .options import PlanOptions

if TYPE_CHECKING:  # importing it would import the solver
    from ..planner import JointSolution

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the widest allowance: where to look first
AHEAD_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2)  # of the budget: room in which nothing of it stays for long
CHANGES_WORK = 20_000  # ops that are played for single changes of decisions
FEW = 200  # tensors, among which it pays to look at all whenever one leaves
REFINEMENTS = 3  # of the two halves beside the best one
_QUICK_SHARE, _THOROUGH_SHARE = 0.05, 0.3  # of the time limit, for each plan beside which other things move


class Planning:
    """Makes the parts of plans in which everything moves.

    Args:
        profile: the step, with everything.
        options: how to plan.
        progress: called with what is being done.
    """

    def __init__(self, profile: Profile, options: PlanOptions, progress: PlanningProgress | None) -> None:
        host_bytes = options.host_bytes(profile)
        if host_bytes is not None:  # what outlives the step may need room for all of it
            left_bytes = host_bytes - sum(each.size_bytes for each in profile.persistent)
            options = replace(options, host_budget=max(1, left_bytes))
        self._options, self._progress = options, progress

    def dataflow(self, profile: Profile) -> Dataflow:
        """What is planned of a profile."""
        return dataflow_of(profile, self._options.region, hooked=True)

    def make(self, evaluator: StageEvaluator, budget_bytes: int, *, thorough: bool) -> PolicyOutcome:
        """Plan activations within a budget."""
        options, share = self._options, _THOROUGH_SHARE if thorough else _QUICK_SHARE
        effort: Effort = options.effort if thorough else "fast"
        chosen = replace(
            options, effort=effort, explain=options.explain and thorough, time_limit_s=share * options.time_limit_s
        )
        return decide(evaluator, budget_bytes, chosen, progress=self._progress)

    def fit(self, evaluator: StageEvaluator, budget_bytes: int, decisions: Decisions) -> PolicyOutcome | None:
        """Make a plan of these decisions, with a few more activations that leave if it does not fit without."""
        from ..planner import fitted

        return fitted(request_of(evaluator, budget_bytes, self._options), decisions)

    def changes(self, dataflow: Dataflow, decisions: Decisions) -> Iterator[dict[int, Choice]]:
        """Yield the decisions with one of them changed, those on the largest activations first."""
        from ..planner import single_changes

        return single_changes(dataflow, decisions)

    def solve(self, evaluator: StageEvaluator, budget_bytes: int, cycle: Cycle) -> JointSolution | None:
        """Solve the program of everything."""
        from ..planner import solve_jointly

        return solve_jointly(request_of(evaluator, budget_bytes, self._options), cycle)


@dataclass(frozen=True, slots=True)
class MovingPlan:
    """A plan for activations within an allowance, and what moves beside them.

    Attributes:
        allowance_bytes: for what outlives the step.
        dataflow: that the activations were planned for.
        planned: their plan.
        residence: who is away when.
        step: the prediction.
    """

    allowance_bytes: int
    dataflow: Dataflow
    planned: PolicyOutcome
    residence: Residence
    step: MovingStep

    @property
    def persistent(self) -> PersistentPlan:
        """What the plan says of what outlives the step."""
        moved = self.residence.moves()
        leaving = {(move.name, move.kind) for move in moved}
        tensors = self.residence.cycle.tensors
        return PersistentPlan(
            moves=moved,
            staying_bytes=sum(each.allocated_bytes for each in tensors if (each.name, each.kind) not in leaving),
            allowance_bytes=self.allowance_bytes,
            copied_out_bytes=self.residence.copied_out_bytes,
            copied_in_bytes=self.residence.copied_in_bytes,
            optimizer_ms=self.step.optimizer_ms,
            tier_bytes=self.residence.tier_bytes,
        )


class MovingPlanner:
    """Looks for the fastest of such plans for one budget.

    Args:
        profile: the step, of which something that outlives it can leave.
        budget_bytes: of everything.
        planning: makes the parts of its plans.

    Attributes:
        bound_ms: no plan is faster.
        is_proven: whether the program says so.
    """

    def __init__(self, profile: Profile, budget_bytes: int, planning: Planning) -> None:
        self._cycle, self._budget_bytes = Cycle(profile), budget_bytes
        self._profile, self._planning = profile, planning
        self._bare = planning.dataflow(with_resident(profile))
        self._found: dict[int, MovingPlan | None] = {}
        self.bound_ms, self.is_proven = sum(op.time_ms for op in profile.ops), False

    def best(self) -> MovingPlan | None:
        """The plan with the shortest step, or None if no allowance was found to have one."""
        widest = min(self._cycle.in_core_bytes, self._budget_bytes)
        for share in SHARES:
            self._at(int(share * widest))
        for _ in range(REFINEMENTS):
            plan = self._shortest()
            if plan is None:
                break
            tried = sorted(self._found)
            place = tried.index(plan.allowance_bytes)
            for neighbour in tried[max(0, place - 1) : place + 2]:
                if abs(neighbour - plan.allowance_bytes) > self._budget_bytes // 200:
                    self._at((neighbour + plan.allowance_bytes) // 2)
        plans = [plan for plan in (self._shortest(), self._of_program()) if plan is not None]
        if not plans:
            return None
        best = min(plans, key=_duration)
        if best.step.timeline.step_ms > self.bound_ms * (1 + OPTIMAL_GAP):
            thorough = self._planned(
                self._cycle.allowed_points(best.allowance_bytes), best.allowance_bytes, thorough=True
            )
            best = best if thorough is None else min(best, thorough, key=_duration)
        return self._climbed(best)

    def _climbed(self, best: MovingPlan) -> MovingPlan:
        """Change single decisions on activations as long as the step becomes shorter; where there are many, few."""
        left = CHANGES_WORK // len(self._profile.ops)
        improves = True
        while improves and left > 0 and best.step.timeline.step_ms > self.bound_ms * (1 + OPTIMAL_GAP):
            improves = False
            for changed in self._planning.changes(best.dataflow, best.planned.decisions):
                left -= 1
                if left <= 0:
                    break
                planned = self._planning.fit(StageEvaluator(best.dataflow), self._budget_bytes, changed)
                plan = None if planned is None else self._moved(best.dataflow, planned, best.allowance_bytes)
                if plan is not None and _duration(plan) < _duration(best):
                    best, improves = plan, True
                    break
        return best

    def _shortest(self) -> MovingPlan | None:
        return min((plan for plan in self._found.values() if plan is not None), key=_duration, default=None)

    def _at(self, allowance_bytes: int) -> None:
        if allowance_bytes not in self._found:
            points = self._cycle.allowed_points(allowance_bytes)
            self._found[allowance_bytes] = self._planned(points, allowance_bytes, thorough=False)

    def _of_program(self) -> MovingPlan | None:
        """The plan that the program says, with what it has of what outlives the step at each point."""
        solution = self._planning.solve(StageEvaluator(self._bare), self._budget_bytes, self._cycle)
        if solution is None:
            return None
        self.bound_ms, self.is_proven = max(self.bound_ms, solution.bound_ms), True
        if not solution.decisions:
            return None
        points = numpy.maximum(solution.resident_points, self._cycle.allowed_points(0))
        dataflow = self._planning.dataflow(with_resident(self._profile, points))
        planned = self._planning.fit(StageEvaluator(dataflow), self._budget_bytes, solution.decisions)
        return None if planned is None else self._moved(dataflow, planned, int(points.max()))

    def _planned(self, points: numpy.ndarray, allowance_bytes: int, *, thorough: bool) -> MovingPlan | None:
        """The plan with so much of what outlives the step at each point, or None if activations do not fit."""
        dataflow = self._planning.dataflow(with_resident(self._profile, points))
        try:
            planned = self._planning.make(StageEvaluator(dataflow), self._budget_bytes, thorough=thorough)
        except InfeasibleBudget:
            return None
        return self._moved(dataflow, planned, allowance_bytes)

    def _ahead_bytes(self) -> list[int]:
        """Room in which nothing stays for long: none, shares of the budget, one or two of the largest tensors."""
        largest_bytes = max(each.allocated_bytes for each in self._cycle.tensors)
        few = {largest_bytes, 2 * largest_bytes}
        return sorted({int(share * self._budget_bytes) for share in AHEAD_SHARES} | few)

    def _moved(self, dataflow: Dataflow, planned: PolicyOutcome, allowance_bytes: int) -> MovingPlan | None:
        schedule = planned.schedule
        others = occupancy(self._bare, schedule.actions, schedule.recomputed).point_bytes
        room_bytes = self._cycle.room_bytes(self._budget_bytes, others)
        plans = []
        orders: tuple[Order, ...] = ("used last", "gradients stay")
        if len(self._cycle.tensors) <= FEW:
            orders = (*orders, "fits best")
        for ahead_bytes, order in product(self._ahead_bytes(), orders):
            found = residence(self._cycle, room_bytes, ahead_bytes, order)
            if found is None:
                return None
            step = simulate_moving(self._bare, schedule, found, detail=False)
            plans.append(MovingPlan(allowance_bytes, dataflow, planned, found, step))
        return min(plans, key=_duration)


def _duration(plan: MovingPlan) -> tuple[float, int]:
    return round(plan.step.timeline.step_ms, 6), plan.residence.copied_in_bytes
