"""Profile + budget -> Plan: the planner, the lowering, the verifier and the simulator in one row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator, verified_timeline
from pooch.api.hooked import dataflow_of
from pooch.api.plan_building import MANUAL, pack_plan
from pooch.api.planning_aside import plan_in_child
from pooch.api.simulation import simulate
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Choice, Decision, Decisions, Plan, Profile, Region
from pooch.planner import Evaluation, PolicyOutcome, described, make_plan, write_program
from pooch.planner import smallest_budget as planned_smallest
from pooch.process_limits import is_limited
from pooch.simulator import simulate as simulate_schedule
from pooch.units import is_smallest, parse_budget

PlanningProgress = Callable[[str, float], None]


def plan(
    profile: Profile,
    budget: int | str,
    *,
    policy: str = "ilp",
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    region: Region = "model",
    known: Sequence[Plan] = (),
    policy_options: Mapping[str, object] | None = None,
    explain: bool = True,
    progress: PlanningProgress | None = None,
) -> Plan:
    """Choose keep, swap or recompute for every activation so that the step fits into the budget and loses little time.

    Args:
        profile: the measured step.
        budget: bytes, a text such as "16GiB", "60%" of the in-core peak, or "min": the smallest for which the policy
            has a plan. It bounds all device bytes of the process's tensors: parameters, gradients, optimizer state,
            inputs, temporaries and activations.
        policy: who decides: "ilp" (the integer program) or a published or plain method by name.
        host_budget: bytes that swapped activations may take in the swap tier; None: no limit.
        time_limit_s: most seconds to plan for; what was found until then carries its gap.
        region: "model": the plan will be applied to calls of the model; "step": to `with run.step()`.
        known: plans made before for the same profile and region: where they fit, "ilp" gives nothing slower.
        policy_options: parameters of the policy, such as {"n_tensors": 3} of "tflms".
        explain: also say what other choices would have cost, which takes some hundred simulations.
        progress: called with what is being done and the share that is done.

    Raises:
        UsageError: the budget, the policy or its parameters cannot be understood, or the step never calls the model
            that a plan of region "model" is for.
        PlanMismatch: a known plan was made for another profile.
        InfeasibleBudget: no plan fits; names the smallest budget that does.
    """
    budget_bytes = budget_in_bytes(
        profile, budget, policy=policy, policy_options=policy_options, host_budget=host_budget, region=region
    )
    host_bytes = None if host_budget is None else parse_budget(host_budget, profile.peak_bytes, name="host budget")
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise UsageError(f"the time limit {time_limit_s} is not positive: give seconds, such as 30")
    region = _region_for(profile, region)
    how: dict[str, Any] = {
        "policy": policy,
        "host_bytes": host_bytes,
        "time_limit_s": time_limit_s,
        "region": region,
        "policy_options": dict(policy_options or {}),
        "explain": explain,
    }
    if is_limited():  # what the solver takes and what it leaves behind would be missing where tensors need it
        made = plan_in_child(profile, budget_bytes, known, how, progress)
        if made is not None:
            return made
    return plan_here(profile, budget_bytes, known=known, progress=progress, **how)


def plan_here(
    profile: Profile,
    budget_bytes: int,
    *,
    policy: str,
    host_bytes: int | None,
    time_limit_s: float,
    region: Region,
    known: Sequence[Plan],
    policy_options: Mapping[str, object],
    explain: bool,
    progress: PlanningProgress | None,
) -> Plan:
    """`plan` in this process, with arguments that were checked and budgets in bytes."""
    make = partial(
        make_plan,
        budget_bytes=budget_bytes,
        known=[_known_outcome(profile, plan) for plan in known if plan.region == region],
        policy_options=policy_options,
        explain=explain,
        policy=policy,
        host_budget_bytes=host_bytes,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    fits = budget_bytes >= profile.peak_bytes
    dataflow = dataflow_of(profile, region, hooked=not fits)
    planned = make(dataflow, evaluator=StageEvaluator(dataflow))
    if fits and planned.schedule.actions:  # a policy that moves things all the same
        dataflow = dataflow_of(profile, region, hooked=True)
        if simulate_schedule(dataflow, planned.schedule, detail=False).peak_bytes > budget_bytes:
            planned = make(dataflow, evaluator=StageEvaluator(dataflow))
    timeline = verified_timeline(dataflow, planned.schedule, planned.decisions, budget_bytes)
    planned = replace(planned, evaluation=Evaluation(planned.schedule, timeline))
    return pack_plan(dataflow, planned, described(policy, policy_options), budget_bytes)


def _known_outcome(profile: Profile, known: Plan) -> PolicyOutcome:
    """A plan as planning can know it.

    Raises:
        PlanMismatch, InvalidSchedule: it is none for this profile.
    """
    return PolicyOutcome(known.decisions, Evaluation(known.schedule, simulate(profile, known)), known.lower_bound_ms)


def write_lp(
    profile: Profile, budget_bytes: int, path: Path, *, host_budget: int | str | None = None, region: Region = "model"
) -> None:
    """Write the integer program of a budget as an LP file.

    Args:
        profile: the measured step.
        budget_bytes: of device memory.
        path: the file.
        host_budget: as `plan` takes it.
        region: as `plan` takes it.
    """
    host_bytes = None if host_budget is None else parse_budget(host_budget, profile.peak_bytes, name="host budget")
    dataflow = dataflow_of(profile, _region_for(profile, region), hooked=budget_bytes < profile.peak_bytes)
    write_program(dataflow, budget_bytes, StageEvaluator(dataflow), path, host_bytes)


def plan_from_decisions(
    profile: Profile, decisions: Decisions, budget: int | str | None = None, *, region: Region = "model"
) -> Plan:
    """Make a plan of hand-made or foreign decisions; activations not named are kept.

    Without a budget, or with "min", the plan reaches the lowest peak that the decisions allow.

    Raises:
        UsageError: a decision names no activation of the region, or asks for an impossible recompute.
        InfeasibleBudget: a budget was given and the decisions do not fit into it.
    """
    started_s = time.monotonic()
    _check_choices(decisions)
    hooked = any(choice != "keep" for choice in decisions.values())
    dataflow = dataflow_of(profile, _region_for(profile, region), hooked=hooked)
    evaluator = StageEvaluator(dataflow)
    if budget is None or is_smallest(budget):
        evaluation = evaluator.evaluate_smallest(decisions)
        budget_bytes = 0 if budget is None else evaluation.timeline.peak_bytes
    else:
        budget_bytes = parse_budget(budget, profile.peak_bytes)
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


def budget_in_bytes(
    profile: Profile,
    budget: int | str,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    region: Region = "model",
    **others: object,
) -> int:
    """What a budget for the step comes to, in bytes. "min" asks for the planner's arguments; `others` of them are not
    needed.

    Raises:
        UsageError: the budget does not parse, or is not positive.
    """
    if not is_smallest(budget):
        return parse_budget(budget, profile.peak_bytes)
    return smallest_budget(
        profile, policy=policy, policy_options=policy_options, host_budget=host_budget, region=region
    )


def smallest_budget(
    profile: Profile,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    region: Region = "model",
) -> int:
    """The smallest budget, in bytes, that the policy is known to keep; asking `plan` for it succeeds.

    Args:
        profile: the measured step.
        policy, policy_options, host_budget, region: as `plan` takes them.

    Raises:
        UsageError: the policy, its parameters, the region or the host budget cannot be understood.
    """
    host_bytes = None if host_budget is None else parse_budget(host_budget, profile.peak_bytes, name="host budget")
    # As `plan` has it for what does not fit.
    dataflow = dataflow_of(profile, _region_for(profile, region), hooked=True)
    needed = planned_smallest(
        dataflow,
        StageEvaluator(dataflow),
        policy=policy,
        policy_options=policy_options,
        host_budget_bytes=host_bytes,
    )
    return min(needed, profile.peak_bytes)


def checked_region(region: str) -> Region:
    """The region, or a line that says which there are.

    Raises:
        UsageError: there is no such region.
    """
    if region == "model":
        return "model"
    if region == "step":
        return "step"
    raise UsageError(f"there is no region {region!r}: choose model or step")


def _region_for(profile: Profile, region: str) -> Region:
    """The region, where the profiled step has it.

    Raises:
        UsageError: it has not, or there is no such region.
    """
    checked = checked_region(region)
    if checked == "model" and profile.model_begin == profile.model_end:
        raise UsageError(
            "the profiled step never calls the model itself (it calls model.forward(...), or parts of the model as "
            "training_step does), so a plan of its calls would do nothing: plan for region 'step' and put the forward "
            "pass into `with run.step():`"
        )
    return checked


def _check_choices(decisions: Decisions) -> None:
    for value, choice in decisions.items():
        if choice not in ("keep", "swap", "recompute"):
            raise UsageError(f"the decision {choice!r} for value {value} is none of keep, swap, recompute")


def manual_rows(dataflow: Dataflow, decisions: Decisions) -> tuple[Decision, ...]:
    """One row per activation of the region, for decisions that no policy made."""
    return tuple(_manual_row(dataflow, value.id, decisions) for value in dataflow.activations)


def _manual_row(dataflow: Dataflow, value_id: int, decisions: Decisions) -> Decision:
    value = dataflow.profile.values[value_id]
    choice: Choice = decisions.get(value_id, "keep")
    link = dataflow.profile.link
    copy_ms = link.out_ms(value.size_bytes) + link.in_ms(value.size_bytes)
    reason = "decided by hand" if value_id in decisions else "not named, so kept"
    return Decision(value_id, choice, value.label, value.size_bytes, copy_ms, dataflow.replay_ms(value_id), reason)
