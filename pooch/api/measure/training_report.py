"""A measured training beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...ir import Plan
from .hard_limit import LimitedOutcome
from .timing import Timing
from .training import Trained, first_difference

_OF_THE_PLAN = ("in_core_peak_bytes", "in_core_step_ms", "predicted_peak_bytes", "predicted_step_ms")
_OF_THE_LAST_STEP = ("swapped_out_bytes", "swapped_in_bytes", "recomputed_ops", "stall_ms", "late_swaps", "mismatches")


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """A few measured steps beside what was predicted. None: not measured, or there is no plan.

    Attributes:
        workload: its name.
        policy: that made the plan.
        steps: number of steps.
        measured_peak_bytes: all bytes of the process's tensors.
        bitwise_equal: loss, gradients, parameters, buffers and random states are those of plain training. None also if
            plain training is not repeatable and nothing can be said about the plan.
        first_difference: between planned and plain training, or between two plain ones if those differ.
        budget_bytes: of the plan.
        predicted_peak_bytes: of the plan.
        plain_peak_bytes: measured in plain training.
        within_budget: the measured peak without the allocator's rounding is within the budget. None also if a step left
            the plan, since its predictions do not hold then.
        peak_error: (predicted - measured) / measured.
        predicted_step_ms: of the plan, for the forward and backward pass.
        measured_step_ms: median of the planned steps that took turns with plain ones.
        plain_step_ms: median of those plain steps.
        slowdown: measured_step_ms / plain_step_ms.
        predicted_slowdown: predicted_step_ms / in_core_step_ms.
        swapped_out_bytes: in the last step.
        swapped_in_bytes: in the last step.
        recomputed_ops: in the last step.
        stall_ms: in the last step.
        late_swaps: in the last step.
        mismatches: in the last step.
        hard_limit_plain: how plain training under a hard limit ended.
        hard_limit_planned: how planned training under the same limit ended.
        repairs: how often the plan was replaced because the peak exceeded the budget or memory ran out.
        measured_reserved_bytes: highest bytes that the GPU's caching allocator reserved under the plan.
        plain_reserved_bytes: the same in plain training.
        compared_with: what `bitwise_equal` refers to: plain training, or, if that does not fit, training with all saved
            tensors moved off the device.
        fits_in_core: whether plain steps were run beside the planned ones.
        in_core_peak_bytes: of the profile.
        in_core_step_ms: of the profile; modelled if plain steps do not fit.
        steps_off_plan: number of steps that were not the planned one (another batch size, for example).
        repeatable: whether plain training gives the same numbers twice.
        hard_limit_slack_bytes: granted above the budget to all trainings under a hard limit.
        rounding_bytes: the part of the measured peak that comes from a caching allocator rounding up.
        difference_cause: why the numbers differ, as far as it is known.
        compared_deterministically: `bitwise_equal` refers to training under PyTorch's deterministic algorithms.
        arena: what an arena served in a further training, in one line.
        arena_bytes: of the arena; 0 without one.
        arena_bound_bytes: the highest sum of live bytes in it: no arena could be smaller.
        arena_share_placed: share of the requests that were served from their place.
        arena_difference: first difference to the same training without an arena, if they were compared.
        hard_limit_arena: how planned training on an arena ended under the same limit.
        verified: which replays gave the same bytes as what they replaced, in one line.
        steps_over_budget: number of steps whose peak without the allocator's rounding was over the budget.
        plain_step_samples_ms: of the plain steps, in order; plain_step_ms is their median.
        measured_step_samples_ms: of the planned steps, in order; measured_step_ms is their median.
        replay_differences: number of replays that gave other bytes; their values are copied since. None: nothing was
            compared.
    """

    workload: str
    policy: str
    steps: int
    measured_peak_bytes: int
    bitwise_equal: bool | None = None
    first_difference: str | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    plain_peak_bytes: int | None = None
    within_budget: bool | None = None
    peak_error: float | None = None
    predicted_step_ms: float | None = None
    measured_step_ms: float | None = None
    plain_step_ms: float | None = None
    slowdown: float | None = None
    predicted_slowdown: float | None = None
    swapped_out_bytes: int | None = None
    swapped_in_bytes: int | None = None
    recomputed_ops: int | None = None
    stall_ms: float | None = None
    late_swaps: int | None = None
    mismatches: int | None = None
    hard_limit_plain: str | None = None
    hard_limit_planned: str | None = None
    repairs: int = 0
    measured_reserved_bytes: int | None = None
    plain_reserved_bytes: int | None = None
    compared_with: Literal["plain", "offloaded"] | None = None
    fits_in_core: bool | None = None
    in_core_peak_bytes: int | None = None
    in_core_step_ms: float | None = None
    steps_off_plan: int = 0
    repeatable: bool | None = None
    hard_limit_slack_bytes: int | None = None
    rounding_bytes: int = 0
    difference_cause: str | None = None
    compared_deterministically: bool = False
    arena: str | None = None
    arena_bytes: int | None = None
    arena_bound_bytes: int | None = None
    arena_share_placed: float | None = None
    arena_difference: str | None = None
    hard_limit_arena: str | None = None
    verified: str | None = None
    steps_over_budget: int | None = None
    plain_step_samples_ms: tuple[float, ...] = ()
    measured_step_samples_ms: tuple[float, ...] = ()
    replay_differences: int | None = None

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the peak without the allocator's rounding is over the budget; negative if it is not."""
        return self.measured_peak_bytes - self.rounding_bytes - (self.budget_bytes or 0)


def plain_report(workload: str, plain: Trained) -> TrainingReport:
    """Report a plain training."""
    return TrainingReport(
        workload=workload,
        policy="none (plain training)",
        steps=len(plain.steps),
        measured_peak_bytes=plain.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        rounding_bytes=plain.rounding_bytes,
        measured_reserved_bytes=plain.reserved_bytes,
        plain_reserved_bytes=plain.reserved_bytes,
    )


def report_of(
    plan: Plan, planned: Trained, timing: Timing, reference: Trained | None, outcomes: Mapping[str, LimitedOutcome]
) -> TrainingReport:
    """Report a training under a plan.

    Args:
        plan: the plan at the end of the training.
        planned: the training.
        timing: plain and planned steps that took turns.
        reference: the training whose numbers it has to reproduce. None: not compared.
        outcomes: of "plain" and "planned" training under a hard limit, and of planned training on an "arena".
    """
    difference = first_difference(reference, planned) if reference else None
    plain = reference if reference is not None and not reference.offloaded else None
    stats, peak, rounding = planned.stats, planned.peak_bytes, planned.rounding_bytes
    assert stats is not None
    off_plan = sum(step.left_plan for step in planned.steps)
    was_compared = planned.verified is not None and bool(planned.verified.recipes or planned.verified.differences)
    return TrainingReport(
        workload=plan.workload,
        policy=plan.policy,
        **{name: getattr(plan, name) for name in _OF_THE_PLAN},
        steps=len(planned.steps),
        bitwise_equal=None if reference is None else difference is None,
        compared_with=None if reference is None else ("plain" if plain else "offloaded"),
        fits_in_core=timing.plain_ms is not None,
        first_difference=difference,
        budget_bytes=plan.budget_bytes or None,
        measured_peak_bytes=peak,
        plain_peak_bytes=plain.peak_bytes if plain else None,
        rounding_bytes=rounding,
        within_budget=peak - rounding <= plan.budget_bytes if plan.budget_bytes and not off_plan else None,
        peak_error=(plan.predicted_peak_bytes - peak) / peak,
        measured_step_ms=timing.planned_ms,
        plain_step_ms=timing.plain_ms,
        slowdown=None if timing.plain_ms is None else timing.planned_ms / timing.plain_ms,
        predicted_slowdown=plan.predicted_step_ms / plan.in_core_step_ms,
        **{name: getattr(stats, name) for name in _OF_THE_LAST_STEP},
        hard_limit_plain=_outcome_text(outcomes.get("plain")),
        hard_limit_planned=_outcome_text(outcomes.get("planned")),
        hard_limit_arena=_outcome_text(outcomes.get("arena")),
        hard_limit_slack_bytes=outcomes["planned"].slack_bytes if "planned" in outcomes else None,
        repairs=planned.repairs,
        measured_reserved_bytes=planned.reserved_bytes,
        plain_reserved_bytes=plain.reserved_bytes if plain else None,
        steps_off_plan=off_plan,
        verified=None if planned.verified is None or not stats.recomputed_ops else str(planned.verified),
        steps_over_budget=sum(each.peak_bytes - each.rounding_bytes > plan.budget_bytes for each in planned.steps)
        if plan.budget_bytes
        else None,
        plain_step_samples_ms=timing.plain_samples_ms,
        measured_step_samples_ms=timing.planned_samples_ms,
        replay_differences=len(planned.verified.differences) if planned.verified and was_compared else None,
    )


def _outcome_text(outcome: LimitedOutcome | None) -> str | None:
    if outcome is None:
        return None
    if not outcome.survived:
        return f"died: {outcome.message}"
    return "went through" if outcome.arena is None else f"went through; arena: {outcome.arena}"
