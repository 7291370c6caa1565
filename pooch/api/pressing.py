"""A plan that needs more than the budget, to be followed under it: what it keeps leaves to make up for the rest."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.dataflow import Dataflow
from ..ground.units import format_bytes, round_up
from ..ir import Plan, Profile, Timeline
from ..ir.schedule import TIER_ALIGNMENT_BYTES
from ..planner import Evaluation, PolicyOutcome
from ..simulator import run_online
from ..simulator.pressed import least_bytes, pressed
from .evaluation import StageEvaluator, verified_timeline
from .hooked import dataflow_of
from .options import PlanOptions
from .plan_building import notes_of, pack_plan


@dataclass(frozen=True, slots=True)
class PressedPlan:
    """A plan to be followed under a budget that is smaller than what it needs.

    Attributes:
        plan: the plan.
        moving_ms: what a step takes longer than the plan predicts, since more leaves than the plan decides.
        over_bytes: by how much it passes the budget if all that is counted as live before it stays; 0: it does not.
    """

    plan: Plan
    moving_ms: float
    over_bytes: int = 0


def plan_under_pressure(profile: Profile, plan: Plan, budget_bytes: int, options: PlanOptions) -> PressedPlan | None:
    """Lower the decisions of a plan for less than it needs, if that is better than a step without a plan.

    The plan then passes the budget only where its decisions cannot do with less, and values that it keeps leave there.
    It is better if the budget is passed by no more than where everything leaves that can, and if the step is predicted
    to be no slower than one that evicts as memory runs short.

    Args:
        profile: what the plan was made for.
        plan: the plan.
        budget_bytes: what is held beneath it.
        options: how it was planned.

    Returns:
        None if a step without a plan is better, or the tier has too little room.
    """
    if plan.splits:
        return None  # a step without a plan is the one that is whole
    dataflow = dataflow_of(profile, plan.region, hooked=True)
    lowered, timeline = _lowered(dataflow, plan, budget_bytes)
    pressure = pressed(dataflow, lowered.schedule, timeline.point_bytes, budget_bytes)
    if pressure.over_bytes > max(0, least_bytes(dataflow) - budget_bytes):
        return None
    host_bytes = options.host_bytes(profile)
    moved = (profile.values[value].size_bytes for value in pressure.moved)
    tier_bytes = lowered.schedule.host_bytes + sum(round_up(size_bytes, TIER_ALIGNMENT_BYTES) for size_bytes in moved)
    if host_bytes is not None and tier_bytes > host_bytes:
        return None
    without = run_online(dataflow, budget_bytes, host_bytes)
    if timeline.step_ms + pressure.moving_ms > without.step_ms:
        return None
    return PressedPlan(lowered, pressure.moving_ms, pressure.over_bytes)


def _lowered(dataflow: Dataflow, plan: Plan, budget_bytes: int) -> tuple[Plan, Timeline]:
    """The plan with its decisions lowered for a budget that they do not fit into.

    Raises:
        InvalidSchedule: it cannot be executed.
    """
    evaluation = StageEvaluator(dataflow).evaluate(plan.decisions, budget_bytes)
    needed_bytes = max(plan.budget_bytes, evaluation.timeline.peak_bytes)
    timeline = verified_timeline(dataflow, evaluation.schedule, plan.decisions, needed_bytes)
    told = tuple(note for note in plan.notes if note not in notes_of(dataflow, plan.schedule))
    note = f"made for {format_bytes(budget_bytes)}, where it needs more: what it keeps leaves to make up for that"
    outcome = PolicyOutcome(
        plan.decisions,
        Evaluation(evaluation.schedule, timeline),
        plan.lower_bound_ms,
        proven=plan.status != "heuristic",
        notes=(*told, note),
        rows=plan.choices,
        planning_ms=plan.planning_ms,
    )
    return pack_plan(dataflow, outcome, plan.policy, needed_bytes), timeline
