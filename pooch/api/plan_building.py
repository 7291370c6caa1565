"""Packs decisions, schedule and prediction into a self-contained `Plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from ..analysis.dataflow import Dataflow
from ..ir import ExpectedOp, Plan, Profile, Schedule
from ..ir.layout import StepLayout
from ..ir.plan import Bound
from ..planner import PolicyOutcome
from ..planner.contract import FITS, OPTIMAL_GAP, gap_between
from ..schedule import verify, verify_residence

if TYPE_CHECKING:
    from .moving import MovingPlan, MovingPlanner

MANUAL: Final = "manual"  # the policy, and the status, of decisions that a person made
CALLED_AGAIN: Final = (
    "the step calls the model several times: what is predicted has the plan in the first call alone, while each call "
    "follows it, and takes less memory and more time than that; plan for region 'step', which covers all of them"
)


def pack_plan(
    dataflow: Dataflow,
    planned: PolicyOutcome,
    policy: str,
    budget_bytes: int,
    *,
    bound: Bound = "live",
    layout: StepLayout | None = None,
) -> Plan:
    """Make the plan that is saved, simulated and executed.

    Args:
        dataflow: the profile and region that were planned for.
        planned: the decisions and their detailed simulation.
        policy: who decided, with its parameters.
        budget_bytes: what was asked for.
        bound: what the budget bounds.
        layout: the arena of the step, if it was packed.
    """
    profile = dataflow.profile
    return Plan(
        workload=profile.workload,
        device_kind=profile.device.kind,
        model_signature=profile.model_signature,
        policy=policy,
        region=dataflow.region,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=planned.timeline.peak_bytes,
        predicted_step_ms=planned.step_ms,
        in_core_peak_bytes=profile.peak_bytes,
        in_core_step_ms=profile.step_ms,
        lower_bound_ms=planned.lower_bound_ms,
        gap=planned.gap,
        status=MANUAL if policy == MANUAL else planned.status,
        notes=(*planned.notes, *notes_of(dataflow, planned.schedule)),
        choices=planned.rows,
        schedule=planned.schedule,
        expected=expected_ops(dataflow),
        anchors=dataflow.anchors,
        first_slot=dataflow.forward_slots.start,
        planning_ms=planned.planning_ms,
        persistent_bytes=profile.persistent_bytes,
        bound=bound,
        layout=layout,
        gathered=_gathered(dataflow, planned.schedule),
        from_gathered=tuple(value for value in planned.schedule.recomputed if value in dataflow.from_gathered),
        microbatches_in_flight=profile.in_flight.microbatches,
        accumulates=profile.accumulates,
        splits=profile.splits,
    )


def pack_moving(profile: Profile, moving: MovingPlan, planner: MovingPlanner, policy: str, budget_bytes: int) -> Plan:
    """Make the plan in which also leaves what outlives the step, once what it promises is checked.

    Args:
        profile: the step as it was measured.
        moving: the plan for its activations, and what else leaves.
        planner: what found it, and knows the lower bound.
        policy: who decided on the activations, with its parameters.
        budget_bytes: what was asked for.

    Raises:
        InvalidSchedule: something is not there when it is used, or the bytes exceed the budget.
    """
    planned = moving.planned
    verify(moving.dataflow, planned.schedule, planned.decisions, budget_bytes)
    verify_residence(moving.residence, moving.step.timeline, budget_bytes)
    plan = pack_plan(moving.dataflow, planned, policy, budget_bytes)
    step_ms = moving.step.timeline.step_ms
    gap = gap_between(step_ms, planner.bound_ms)
    proven: Literal["optimal", "feasible"] = "optimal" if gap <= OPTIMAL_GAP else "feasible"
    return replace(
        plan,
        predicted_peak_bytes=moving.step.timeline.peak_bytes,
        predicted_step_ms=step_ms,
        in_core_peak_bytes=profile.peak_bytes,
        persistent_bytes=profile.persistent_bytes,
        lower_bound_ms=min(planner.bound_ms, step_ms),
        gap=gap,
        status=proven if planner.is_proven else "heuristic",
        notes=tuple(note for note in plan.notes if note != FITS),
        persistent=moving.persistent,
    )


def _gathered(dataflow: Dataflow, schedule: Schedule) -> tuple[int, ...]:
    """The gathered parameters that the replays of a schedule read."""
    replayed = {action.target for action in schedule.actions if action.kind == "replay"}
    read = {value for op in replayed for value in dataflow.profile.ops[op].reads}
    return tuple(sorted(value for value in read if dataflow.gathering.is_gathered(value)))


def notes_of(dataflow: Dataflow, schedule: Schedule) -> tuple[str, ...]:
    """What any plan says of its profile and region: what was not measured, and what the prediction leaves out."""
    modelled = tuple(note for note in dataflow.profile.notes if "modelled" in note)
    return (*modelled, CALLED_AGAIN) if schedule.actions and _calls_again(dataflow) else modelled


def _calls_again(dataflow: Dataflow) -> bool:
    """Whether all modules of the region run once more after it."""
    profile, region = dataflow.profile, dataflow.forward_slots
    within = {profile.ops[slot].module for slot in region} - {""}
    return bool(within) and within <= {op.module for op in profile.ops[region.stop : profile.forward_ops]}


def expected_ops(dataflow: Dataflow) -> tuple[ExpectedOp, ...]:
    """The forward ops that the runtime will see: how to know each again, and the ids of what it writes and reads."""
    ops = (dataflow.profile.ops[slot] for slot in dataflow.forward_slots)
    return tuple(ExpectedOp(op.name, op.fingerprint, op.writes, op.reads) for op in ops)
