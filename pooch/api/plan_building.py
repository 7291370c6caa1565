"""Packs decisions, schedule and prediction into a self-contained `Plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Decision, ExpectedOp, Plan, Profile, Schedule, Timeline


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What a policy, or a person, decided, and how good it is; the fields are those of `Plan`."""

    policy: str
    budget_bytes: int
    lower_bound_ms: float
    status: Literal["optimal", "feasible", "heuristic", "manual"]
    notes: tuple[str, ...]
    choices: tuple[Decision, ...]
    planning_ms: float


def pack_plan(dataflow: Dataflow, schedule: Schedule, timeline: Timeline, outcome: PlanOutcome) -> Plan:
    """Make the plan that is saved, simulated and executed."""
    profile = dataflow.profile
    return Plan(
        workload=profile.workload,
        device_kind=profile.device.kind,
        model_signature=profile.model_signature,
        policy=outcome.policy,
        region=dataflow.region,
        budget_bytes=outcome.budget_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_step_ms=timeline.step_ms,
        in_core_peak_bytes=profile.peak_bytes,
        in_core_step_ms=profile.step_ms,
        lower_bound_ms=outcome.lower_bound_ms,
        gap=_gap(timeline.step_ms, outcome.lower_bound_ms),
        status=outcome.status,
        notes=(*outcome.notes, *modelled_notes(profile)),
        choices=outcome.choices,
        schedule=schedule,
        expected=expected_ops(dataflow),
        anchors=dataflow.anchors,
        first_slot=dataflow.forward_slots.start,
        planning_ms=outcome.planning_ms,
        persistent_bytes=profile.persistent_bytes,
    )


def modelled_notes(profile: Profile) -> tuple[str, ...]:
    """What of a profile was not measured: a plan that was made from it says so too."""
    return tuple(note for note in profile.notes if "modelled" in note)


def expected_ops(dataflow: Dataflow) -> tuple[ExpectedOp, ...]:
    """The forward ops that the runtime will see: how to know each again, and the ids of what it writes."""
    ops = (dataflow.profile.ops[slot] for slot in dataflow.forward_slots)
    return tuple(ExpectedOp(op.name, op.fingerprint, op.writes) for op in ops)


def _gap(step_ms: float, lower_bound_ms: float) -> float:
    return max(0.0, (step_ms - lower_bound_ms) / step_ms) if step_ms > 0 else 0.0
