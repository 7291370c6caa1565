"""Plans in which also leaves what outlives the step, beside those in which it stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle
from ..ground.errors import InfeasibleBudget
from ..ground.progress import PlanningProgress
from ..ground.units import format_ms
from ..ir import Choice, Decisions, Plan, Profile
from ..planner import Effort, PolicyOutcome, described
from .deciding import decide, request_of
from .evaluation import StageEvaluator
from .hooked import dataflow_of
from .moving import MovingPlanner
from .options import PlanOptions
from .plan_building import pack_moving
from .smallest import smallest_moving

if TYPE_CHECKING:  # importing it would import the solver
    from ..planner import JointSolution

_QUICK_SHARE, _THOROUGH_SHARE = 0.05, 0.3  # of the time limit, for each plan beside which other things move


def plan_moving(
    profile: Profile,
    budget_bytes: int,
    options: PlanOptions,
    progress: PlanningProgress | None,
    plan_staying: Callable[[PlanOptions], Plan],
) -> Plan:
    """Let what outlives the step leave as well, if the step is shorter with it, or fits in no other way.

    Args:
        profile: the step, with everything.
        budget_bytes: for all of it.
        options: how to plan.
        progress: called with what is being done.
        plan_staying: plans the activations alone, within the same budget.

    Raises:
        InfeasibleBudget: nothing fits; names the smallest budget for which there is such a plan.
    """
    started_s = time.monotonic()
    planner = MovingPlanner(profile, budget_bytes, _ByOptions(profile, options, progress))
    moving, infeasible = planner.best(), None
    try:
        staying = plan_staying(replace(options, moves="activations"))
    except InfeasibleBudget as error:
        staying, infeasible = None, error
    if moving is None:
        if staying is not None:
            return staying
        raise InfeasibleBudget(budget_bytes, smallest_moving(profile, options), options.policy) from infeasible
    plan = pack_moving(profile, moving, planner, described(options.policy, options.policy_options), budget_bytes)
    plan = replace(plan, planning_ms=(time.monotonic() - started_s) * 1e3)
    if staying is not None and staying.predicted_step_ms <= plan.predicted_step_ms:
        note = f"what outlives the step stays: with it moving, the step would take {format_ms(plan.predicted_step_ms)}"
        return replace(staying, notes=(*staying.notes, note))
    return plan


class _ByOptions:
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
