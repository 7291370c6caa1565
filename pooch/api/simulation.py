"""Profile + Plan -> Timeline, after checking that the two belong together."""

from __future__ import annotations

from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import verified_timeline
from pooch.api.hooked import dataflow_of
from pooch.api.plan_building import expected_ops
from pooch.errors import PlanMismatch
from pooch.ir import Plan, Profile, Schedule, Timeline
from pooch.simulator import simulate as simulate_schedule


def simulate(profile: Profile, plan: Plan) -> Timeline:
    """Predict one step under the plan: time, stalls, the memory curve, and what each stream does.

    Raises:
        PlanMismatch: the plan was made for another profile.
        InvalidSchedule: the plan's schedule would fault (a file changed by hand).
    """
    dataflow = dataflow_of(profile, plan.region, hooked=bool(plan.schedule.actions))
    check_belongs(dataflow, plan)
    return verified_timeline(dataflow, plan.schedule, plan.decisions, plan.budget_bytes or plan.predicted_peak_bytes)


def simulate_in_core(profile: Profile) -> Timeline:
    """The step as it was measured: nothing leaves, nothing is recomputed."""
    return simulate_schedule(Dataflow(profile), Schedule((), (), (), (), (), 0), detail=True)


def check_belongs(dataflow: Dataflow, plan: Plan) -> None:
    """Refuse a plan that was made for another profile.

    Raises:
        PlanMismatch: with the first difference.
    """
    profile = dataflow.profile
    remedy = "plan this profile with `pooch plan`"
    if plan.model_signature != profile.model_signature:
        raise PlanMismatch(f"the plan is for another model ({plan.workload}, not {profile.workload}): {remedy}")
    expected = expected_ops(dataflow)
    if len(plan.expected) != len(expected):
        counts = f"{len(plan.expected)} forward ops, not {len(expected)}"
        raise PlanMismatch(f"the plan is for another profile of {profile.workload} ({counts}): {remedy}")
    for position, (planned, profiled) in enumerate(zip(plan.expected, expected, strict=True)):
        if planned != profiled:
            names = f"op {position} is {planned.fingerprint}, not {profiled.fingerprint}"
            raise PlanMismatch(f"the plan is for another profile of {profile.workload} ({names}): {remedy}")
    if plan.first_slot != dataflow.forward_slots.start or plan.anchors != dataflow.anchors:
        raise PlanMismatch(
            f"the plan is for another profile of {profile.workload} (its first slot or its anchors differ): {remedy}"
        )
    if not plan.decisions.keys() <= dataflow.activation_ids:
        raise PlanMismatch(f"the plan decides on values that are no activations of the profile: {remedy}")
