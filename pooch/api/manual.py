"""Plans of decisions that no policy made."""

from __future__ import annotations

import time
from pathlib import Path

from ..analysis.dataflow import Dataflow
from ..ground.errors import InfeasibleBudget
from ..ir import Choice, Decision, Decisions, Plan, Profile, Region
from ..ir.arguments import profile_of
from ..planner import Evaluation, PolicyOutcome
from .budgets import is_smallest
from .evaluation import StageEvaluator, verified_timeline
from .free_memory import budget_bytes_of
from .hooked import dataflow_of
from .options import checked_region, in_flight
from .plan_building import MANUAL, pack_plan
from .plan_checks import check_choices, check_region_of


def plan_from_decisions(
    profile: Profile | str | Path,
    decisions: Decisions,
    budget: float | str | None = None,
    *,
    region: Region = "model",
    microbatches_in_flight: int = 1,
) -> Plan:
    """Make a plan of hand-made or foreign decisions; activations not named are kept.

    Without a budget, or with "min", the plan reaches the lowest peak that the decisions allow. The region and the
    number of microbatches in flight are as for `plan`.

    Raises:
        UsageError: a decision names no activation of the region, or asks for an impossible recompute.
        InfeasibleBudget: a budget was given and the decisions do not fit into it.
    """
    started_s = time.monotonic()
    profile = profile_of(profile, "plan_from_decisions")
    check_choices(decisions)
    check_region_of(profile, checked_region(region))
    profile = in_flight(profile, microbatches_in_flight)
    hooked = any(choice != "keep" for choice in decisions.values())
    dataflow = dataflow_of(profile, region, hooked=hooked)
    evaluator = StageEvaluator(dataflow)
    if budget is None or is_smallest(budget):
        evaluation = evaluator.evaluate_smallest(decisions)
        budget_bytes = 0 if budget is None else evaluation.timeline.peak_bytes
    else:
        budget_bytes = budget_bytes_of(profile, budget)
        evaluation = evaluator.evaluate(decisions, budget_bytes)
        if evaluation.timeline.peak_bytes > budget_bytes:
            minimum_bytes = evaluator.evaluate_smallest(decisions).timeline.peak_bytes
            raise InfeasibleBudget(budget_bytes, minimum_bytes, MANUAL)
    planning_ms = (time.monotonic() - started_s) * 1e3
    return manual_plan(dataflow, evaluation, decisions, budget_bytes, planning_ms=planning_ms)


def manual_plan(
    dataflow: Dataflow,
    evaluation: Evaluation,
    decisions: Decisions,
    budget_bytes: int = 0,
    *,
    planning_ms: float = 0.0,
) -> Plan:
    """Pack decisions that no policy made, once the verifier has passed their schedule.

    Args:
        dataflow: the profile and region that they are for.
        evaluation: what the decisions were lowered to.
        decisions: activations not named are kept.
        budget_bytes: what was asked for; 0: nothing.
        planning_ms: wall time spent.

    Raises:
        InvalidSchedule: the schedule cannot be executed.
    """
    most_bytes = budget_bytes or evaluation.timeline.peak_bytes
    timeline = verified_timeline(dataflow, evaluation.schedule, decisions, most_bytes)
    in_core_ms = sum(dataflow.op_times_ms)  # no schedule can be faster than its ops
    planned = PolicyOutcome(
        dict(decisions),
        Evaluation(evaluation.schedule, timeline),
        in_core_ms,
        rows=manual_rows(dataflow, decisions),
        planning_ms=planning_ms,
    )
    return pack_plan(dataflow, planned, MANUAL, budget_bytes)


def manual_rows(dataflow: Dataflow, decisions: Decisions) -> tuple[Decision, ...]:
    """One row per activation of the region, for decisions that no policy made."""
    return tuple(_manual_row(dataflow, value.id, decisions) for value in dataflow.activations)


def _manual_row(dataflow: Dataflow, value_id: int, decisions: Decisions) -> Decision:
    value = dataflow.profile.values[value_id]
    choice: Choice = decisions.get(value_id, "keep")
    link = dataflow.profile.link
    copy_ms = link.out_ms(value.size_bytes, packs=value.packs) + link.in_ms(value.size_bytes, packs=value.packs)
    reason = "decided by hand" if value_id in decisions else "not named, so kept"
    return Decision(value_id, choice, value.label, value.size_bytes, copy_ms, dataflow.replay_ms(value_id), reason)
