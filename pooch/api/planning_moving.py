"""Plans in which also leaves what outlives the step, beside those in which it stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..ground.errors import InfeasibleBudget
from ..ground.progress import PlanningProgress
from ..ground.units import format_ms
from ..ir import Plan, Profile
from ..planner import described
from .moving import MovingPlanner, Planning
from .options import PlanOptions
from .plan_building import pack_moving
from .smallest import smallest_moving


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
    planner = MovingPlanner(profile, budget_bytes, Planning(profile, options, progress))
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
