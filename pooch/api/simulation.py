"""Profile + Plan -> Timeline, after checking that the two belong together."""

from __future__ import annotations

from pathlib import Path

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle, residence_of, with_resident
from ..ground.errors import PlanMismatch
from ..ir import Plan, Profile, Schedule, Timeline
from ..ir.arguments import plan_of, profile_of
from ..ir.layout import OF_VALUES
from ..schedule import verify, verify_residence
from ..simulator import MovingStep, simulate_moving
from ..simulator import simulate as simulate_schedule
from .evaluation import verified_timeline
from .hooked import dataflow_of
from .options import in_flight
from .plan_building import expected_ops


def simulate(profile: Profile | str | Path, plan: Plan | str | Path) -> Timeline:
    """Predict one step under the plan: time, stalls, the memory curve, and what each stream does.

    Args:
        profile: the measured step, or the path of a saved profile.
        plan: made for it, or the path of a saved plan.

    Raises:
        PlanMismatch: the plan was made for another profile.
        UsageError: one of the two is something else, or the profile includes another number of microbatches in flight
            than the plan is for.
        InvalidSchedule: the plan's schedule cannot be executed (a file that was changed by hand).
    """
    profile, plan = profile_of(profile, "simulate"), plan_of(plan, "simulate")
    moving = simulate_moves_of(profile, plan)
    if moving is not None:
        return moving.timeline
    profile = in_flight(profile.variant(plan.splits), plan.microbatches_in_flight)
    dataflow = dataflow_of(profile, plan.region, hooked=bool(plan.schedule.actions))
    check_belongs(dataflow, plan)
    return verified_timeline(dataflow, plan.schedule, plan.decisions, plan.budget_bytes or plan.predicted_peak_bytes)


def simulate_moves_of(profile: Profile, plan: Plan) -> MovingStep | None:
    """Predict one of many equal steps in which also leaves what outlives them, or return None if under the plan it
    stays.

    Args:
        profile: the measured step.
        plan: made for it.

    Raises:
        PlanMismatch: the plan was made for another profile.
        InvalidSchedule: it cannot be executed.
    """
    persistent = plan.persistent
    if persistent is None:
        return None
    profile = profile.variant(plan.splits)
    dataflow = dataflow_of(with_resident(profile), plan.region, hooked=True)
    check_belongs(dataflow, plan)
    residence = residence_of(Cycle(profile), persistent.moves)
    if residence is None:
        raise PlanMismatch(
            f"the plan is for another profile of {profile.workload} (other parameters leave): plan this profile with "
            "`pooch plan`"
        )
    budget_bytes = plan.budget_bytes or plan.predicted_peak_bytes
    verify(dataflow, plan.schedule, plan.decisions, budget_bytes)
    step = simulate_moving(dataflow, plan.schedule, residence)
    verify_residence(residence, step.timeline, budget_bytes)
    return step


def simulate_in_core(profile: Profile) -> Timeline:
    """Predict the in-core step: nothing is swapped or recomputed."""
    return simulate_schedule(Dataflow(profile), Schedule((), (), (), (), (), 0), detail=True)


def check_belongs(dataflow: Dataflow, plan: Plan) -> None:
    """Refuse a plan that was made for another profile.

    Raises:
        PlanMismatch: names the first difference.
    """
    profile = dataflow.profile
    remedy = "plan this profile with `pooch plan`"
    other = f"the plan is for another profile of {profile.workload}"
    if plan.model_signature != profile.model_signature:
        raise PlanMismatch(f"the plan is for another model ({plan.workload}, not {profile.workload}): {remedy}")
    expected = expected_ops(dataflow)
    if len(plan.expected) != len(expected):
        raise PlanMismatch(f"{other} ({len(plan.expected)} forward ops, not {len(expected)}): {remedy}")
    for position, (planned, profiled) in enumerate(zip(plan.expected, expected, strict=True)):
        if planned != profiled:
            names = f"op {position} is {planned.fingerprint}, not {profiled.fingerprint}"
            raise PlanMismatch(f"{other} ({names}): {remedy}")
    if plan.microbatches_in_flight != profile.in_flight.microbatches:
        counts = f"{plan.microbatches_in_flight} microbatches in flight, not {profile.in_flight.microbatches}"
        raise PlanMismatch(f"the plan is for {counts}: {remedy}")
    if plan.first_slot != dataflow.forward_slots.start or plan.anchors != dataflow.anchors:
        raise PlanMismatch(f"{other} (its first slot or its anchors differ): {remedy}")
    if not plan.decisions.keys() <= dataflow.activation_ids:
        raise PlanMismatch(f"the plan decides on values that are not activations of the profile: {remedy}")
    if plan.layout is not None:
        for block in plan.layout.blocks:
            if block.target >= len(profile.values if block.kind in OF_VALUES else profile.ops):
                raise PlanMismatch(f"{other} (its arena has a block {block.kind} {block.target}): {remedy}")
