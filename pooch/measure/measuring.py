"""What was promised against what was measured: `pooch run` and `pooch optimize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pooch.api.planning import budget_in_bytes
from pooch.api.planning import plan as make_plan
from pooch.api.profiling import Mode, profile_workload
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile, Region
from pooch.measure.checking import judge, train_reference
from pooch.measure.hard_limit import LimitedOutcome, train_limited
from pooch.measure.training import Timing, Trained, first_difference, time_in_turns, train_steps
from pooch.progress import Progress, silent
from pooch.workloads import Workload
from pooch.workloads.loading import WorkloadFactory

if TYPE_CHECKING:
    import torch

WhenTrained = Callable[[Workload], None]
MOST_REPAIRS = 2


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """A few measured steps beside what was predicted. None: not measured, or there is no plan.

    Attributes:
        steps: trained. bitwise_equal: loss, gradients, parameters, buffers and random state are those of plain
        training.
        repeatable: whether plain training itself gives the same numbers twice. Where it does not, `bitwise_equal` is
            about training under deterministic algorithms, or None where nothing can be said of the plan.
        first_difference: where they are not; of a training that is not repeatable, between two plain ones.
        difference_cause: why, as far as it is known.
        compared_deterministically: `bitwise_equal` is about training under PyTorch's deterministic algorithms.
        budget_bytes, predicted_peak_bytes, measured_peak_bytes, plain_peak_bytes: all bytes of the process's tensors.
        rounding_bytes: the part of the measured peak that a caching allocator handed out beyond what tensors asked for.
        within_budget: the measured peak without that part is at most the budget; None too where a step left the plan,
            whose promises are then void. peak_error: (predicted - measured) / measured.
        predicted_step_ms, measured_step_ms, plain_step_ms: forward and backward. The measured two are medians
            of steps that took turns.
        slowdown: measured_step_ms / plain_step_ms. predicted_slowdown: predicted_step_ms / the profile's in-core step.
        swapped_out_bytes, swapped_in_bytes, recomputed_ops, stall_ms, late_swaps, mismatches: of the last step.
        hard_limit_plain, hard_limit_planned: how training went when the budget was made physical.
        hard_limit_slack_bytes: that both were granted above the budget, for what is no tensor.
        measured_reserved_bytes, plain_reserved_bytes: highest bytes that the GPU's caching allocator had taken, kept
            and split blocks included.
        steps_off_plan: how many of the steps were not those that were planned (another batch size, say).
        repairs: how often the plan was made again, because the measured peak passed the budget or memory ran out.
        compared_with: what `bitwise_equal` is about: plain training, or where that does not fit, training with all of
            its saved tensors moved away.
        fits_in_core: whether plain steps were run beside the planned ones.
        in_core_peak_bytes, in_core_step_ms: of the profile; modelled where plain steps do not fit.
    """

    workload: str
    policy: str
    steps: int
    bitwise_equal: bool | None
    first_difference: str | None
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    plain_peak_bytes: int | None
    within_budget: bool | None
    peak_error: float | None
    predicted_step_ms: float | None
    measured_step_ms: float | None
    plain_step_ms: float | None
    slowdown: float | None
    predicted_slowdown: float | None
    swapped_out_bytes: int | None
    swapped_in_bytes: int | None
    recomputed_ops: int | None
    stall_ms: float | None
    late_swaps: int | None
    mismatches: int | None
    hard_limit_plain: str | None
    hard_limit_planned: str | None
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

    @property
    def excess_bytes(self) -> int:
        """By how much the measured peak passes the budget; not more than 0 where only the allocator's rounding does."""
        return self.measured_peak_bytes - self.rounding_bytes - (self.budget_bytes or 0)


@dataclass(frozen=True, slots=True)
class Optimized:
    """What `optimize` made: the profile, the plan, and the training under it."""

    profile: Profile
    plan: Plan
    training: TrainingReport


def measure_training(
    factory: WorkloadFactory,
    plan: Plan | None,
    *,
    steps: int = 3,
    check: bool = False,
    hard_limit: bool = False,
    when_trained: WhenTrained | None = None,
    progress: Progress = silent,
) -> TrainingReport:
    """Train a workload for some steps and measure it.

    Args:
        factory: builds the workload afresh for each training.
        plan: None: plain training.
        steps: with the optimizer's step after each.
        check: train the same steps plainly first and compare bitwise; where something differs, train plainly once more,
            to tell a training that is not repeatable from a plan that is wrong, and then with deterministic algorithms.
        hard_limit: train twice more in processes that cannot take more than the budget, plainly and planned.
        when_trained: called with the workload after its last step (under the plan, where there is one).

    Raises:
        PlanMismatch: the plan was made for another model or device.
    """
    if plan is None:
        workload = factory()
        plain_only = train_steps(workload, None, steps, progress)
        _tell_trained(when_trained, workload)
        return _plain_report(factory, plain_only)
    how = _HowToTrain(steps, check, hard_limit, when_trained, progress)
    return _measure_plan(factory, plan, how, None)[1]


@dataclass(frozen=True, slots=True)
class _HowToTrain:
    """Arguments of `measure_training`."""

    steps: int
    check: bool
    hard_limit: bool
    when_trained: WhenTrained | None
    progress: Progress


def _measure_plan(
    factory: WorkloadFactory, plan: Plan, how: _HowToTrain, replan: Callable[[int], Plan] | None
) -> tuple[Plan, TrainingReport]:
    """The report, and the plan that it is about: another one than was given if memory ran out and `replan` helped."""
    from pooch.executor.engines.pinned import blocks_kept
    from pooch.torchtools.training_state import model_device

    steps, progress = how.steps, how.progress
    reference = train_reference(factory, plan, steps, progress) if how.check else None
    workload = factory()
    with blocks_kept():
        planned = train_steps(workload, plan, steps, progress, replan)
        _tell_trained(how.when_trained, workload)
        assert planned.plan is not None
        plan = planned.plan
        timing = time_in_turns(workload, plan, steps, progress)
    device = model_device(workload.model)
    del workload
    outcomes = _train_under_limit(factory, plan, steps, device, progress) if how.hard_limit else {}
    report = report_of(plan, planned, timing, reference, outcomes)
    if reference is None:
        return plan, report
    verdict = judge(factory, plan, reference, planned, device, progress)
    return plan, replace(
        report,
        bitwise_equal=verdict.bitwise_equal,
        repeatable=verdict.repeatable,
        first_difference=verdict.first_difference,
        difference_cause=verdict.cause,
        compared_deterministically=verdict.is_deterministic,
    )


def _train_under_limit(
    factory: WorkloadFactory, plan: Plan, steps: int, device: torch.device, progress: Progress
) -> dict[str, LimitedOutcome]:
    """Planned and plain training in processes with the same limit."""
    from pooch.torchtools.device_memory import give_memory_back

    give_memory_back(device)  # what this process's allocator keeps, those processes could not take
    limit = plan.budget_bytes or plan.predicted_peak_bytes
    planned = train_limited(factory, plan, limit, steps, progress)
    plain = train_limited(
        factory,
        None,
        limit,
        steps,
        progress,
        in_core_peak_bytes=plan.in_core_peak_bytes,
        slack_bytes=planned.slack_bytes,
    )
    return {"plain": plain, "planned": planned}


def _tell_trained(when_trained: WhenTrained | None, workload: Workload) -> None:
    if when_trained is not None:
        when_trained(workload)


def report_of(
    plan: Plan, planned: Trained, timing: Timing, reference: Trained | None, outcomes: Mapping[str, LimitedOutcome]
) -> TrainingReport:
    """What was promised beside what was measured.

    Args:
        plan: that was in force at the end.
        planned: the training under it.
        timing: steps that took turns, the plain ones only where they fit.
        reference: training whose numbers it has to repeat; None: not compared.
        outcomes: of "plain" and "planned" training under a hard limit.
    """
    difference = first_difference(reference, planned) if reference else None
    plain = reference if reference is not None and not reference.offloaded else None
    stats, peak, rounding = planned.stats, planned.peak_bytes, planned.rounding_bytes
    assert stats is not None
    off_plan = sum(step.left_plan for step in planned.steps)
    return TrainingReport(
        workload=plan.workload,
        policy=plan.policy,
        steps=len(planned.steps),
        bitwise_equal=None if reference is None else difference is None,
        compared_with=None if reference is None else ("plain" if plain else "offloaded"),
        fits_in_core=timing.plain_ms is not None,
        in_core_peak_bytes=plan.in_core_peak_bytes,
        in_core_step_ms=plan.in_core_step_ms,
        first_difference=difference,
        budget_bytes=plan.budget_bytes or None,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=peak,
        plain_peak_bytes=plain.peak_bytes if plain else None,
        rounding_bytes=rounding,
        within_budget=peak - rounding <= plan.budget_bytes if plan.budget_bytes and not off_plan else None,
        peak_error=(plan.predicted_peak_bytes - peak) / peak,
        predicted_step_ms=plan.predicted_step_ms,
        measured_step_ms=timing.planned_ms,
        plain_step_ms=timing.plain_ms,
        slowdown=None if timing.plain_ms is None else timing.planned_ms / timing.plain_ms,
        predicted_slowdown=plan.predicted_step_ms / plan.in_core_step_ms,
        swapped_out_bytes=stats.swapped_out_bytes,
        swapped_in_bytes=stats.swapped_in_bytes,
        recomputed_ops=stats.recomputed_ops,
        stall_ms=stats.stall_ms,
        late_swaps=stats.late_swaps,
        mismatches=stats.mismatches,
        hard_limit_plain=_outcome_text(outcomes.get("plain")),
        hard_limit_planned=_outcome_text(outcomes.get("planned")),
        hard_limit_slack_bytes=outcomes["planned"].slack_bytes if "planned" in outcomes else None,
        repairs=planned.repairs,
        measured_reserved_bytes=planned.reserved_bytes,
        plain_reserved_bytes=plain.reserved_bytes if plain else None,
        steps_off_plan=off_plan,
    )


def _outcome_text(outcome: LimitedOutcome | None) -> str | None:
    if outcome is None:
        return None
    return "went through" if outcome.survived else f"died: {outcome.message}"


def _plain_report(factory: WorkloadFactory, plain: Trained) -> TrainingReport:
    nothing: dict[str, None] = dict.fromkeys(TrainingReport.__dataclass_fields__)
    known = {
        "repairs": 0,
        "rounding_bytes": plain.rounding_bytes,
        "compared_deterministically": False,
        "steps_off_plan": 0,
        "workload": factory.name,
        "policy": "none (plain training)",
        "steps": len(plain.steps),
        "measured_peak_bytes": plain.peak_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "measured_reserved_bytes": plain.reserved_bytes,
        "plain_reserved_bytes": plain.reserved_bytes,
    }
    return TrainingReport(**{**nothing, **known})  # type: ignore[arg-type]


def optimize(
    factory: WorkloadFactory,
    budget: int | str,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    ranks: int = 1,
    time_limit_s: float = 30.0,
    region: Region = "step",
    mode: Mode = "auto",
    memory_limit: int | str | None = None,
    steps: int = 3,
    check: bool = False,
    hard_limit: bool = False,
    when_trained: WhenTrained | None = None,
    progress: Progress = silent,
) -> Optimized:
    """Profile a workload, plan it under a budget, train it under the plan, and measure that.

    Should the measured peak pass the budget all the same, by more than the allocator's rounding, the plan is made again
    with as much less, and measured again, at most twice.
    `when_trained` is called after each training with the workload that was trained under the plan.
    Should memory run out, the plan is tightened by what was missing and the step is repeated, see `Guard`.

    Raises:
        InfeasibleBudget: no plan fits.
    """
    profile = profile_workload(factory(), mode=mode, memory_limit=memory_limit, progress=progress)
    planning: dict[str, Any] = {
        "policy": policy,
        "policy_options": policy_options,
        "host_budget": host_budget,
        "region": region,
    }
    budget_bytes = budget_in_bytes(profile.shared_by(ranks), budget, **planning)

    def planned_within(target_bytes: int) -> Plan:
        chosen = make_plan(
            profile.shared_by(ranks),
            target_bytes,
            time_limit_s=time_limit_s,
            **planning,
            progress=lambda text, share: progress(f"planning: {text}"),
        )
        return replace(chosen, budget_bytes=budget_bytes)

    how = _HowToTrain(steps, check, hard_limit, when_trained, progress)
    target_bytes, planned = budget_bytes, planned_within(budget_bytes)
    repairs_in_training = 0
    for repairs in range(MOST_REPAIRS + 1):
        chosen, report = _measure_plan(factory, planned, how, planned_within)
        repairs_in_training += report.repairs
        result = Optimized(profile, chosen, replace(report, repairs=repairs + repairs_in_training))
        if report.excess_bytes <= 0 or repairs == MOST_REPAIRS:
            return result
        progress(
            f"the measured peak is {report.excess_bytes} bytes over the budget: planning again with that much less"
        )
        target_bytes -= report.excess_bytes
        try:
            planned = planned_within(max(1, target_bytes))
        except InfeasibleBudget:
            return result  # which says by how much its peak passed the budget
    raise AssertionError("unreachable: the last round returns")
