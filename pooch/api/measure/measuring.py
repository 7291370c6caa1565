"""`pooch run` and `pooch optimize`: train a workload, and report what was measured beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...ground.errors import InfeasibleBudget
from ...ir import Plan, Profile
from ...workloads.loading import WorkloadFactory
from ..budgets import check_budget
from ..options import PlanOptions
from ..planning import plan_with
from ..planning_aside import is_worthwhile
from ..profiling import Mode, profile_workload
from ..smallest import budget_in_bytes
from .arena_training import train_on_arena
from .checking import judge, train_reference
from .hard_limit import LimitedJob, LimitedOutcome, train_limited
from .timing import time_in_turns
from .training import TrainingOptions, train_steps
from .training_report import TrainingReport, plain_report, report_of

if TYPE_CHECKING:
    import torch


MOST_REPAIRS = 2


@dataclass(frozen=True, slots=True)
class Optimized:
    """What `optimize` made: a profile, the last plan, and the training under that plan."""

    profile: Profile
    plan: Plan
    training: TrainingReport


def measure_training(factory: WorkloadFactory, plan: Plan | None, **training: Any) -> TrainingReport:
    """Train a workload for a few steps, plainly or under a plan, and measure it; `training`: fields of
    `TrainingOptions`.

    Raises:
        PlanMismatch: the plan was made for another model or device.
    """
    from ...torchtools.training_state import model_device

    options = TrainingOptions(**training)
    if plan is not None:
        return _measure_plan(factory, plan, options, None)[1]
    workload = factory()
    plain = train_steps(workload, None, options.steps, options.progress)
    if options.when_trained is not None:
        options.when_trained(workload)
    device = model_device(workload.model)
    del workload
    return _with_arena(plain_report(factory.name, plain), factory, None, device, options)


def _measure_plan(
    factory: WorkloadFactory, plan: Plan, options: TrainingOptions, replan: Callable[[int], Plan] | None
) -> tuple[Plan, TrainingReport]:
    """The report and its plan, which is not the given one if memory ran out and `replan` made another."""
    from ...executor.engines.pinned import blocks_kept
    from ...torchtools.training_state import model_device

    steps, progress = options.steps, options.progress
    reference = train_reference(factory, plan, steps, progress) if options.check else None
    workload = factory()
    with blocks_kept():
        planned = train_steps(workload, plan, steps, progress, replan, options.verify)
        if options.when_trained is not None:
            options.when_trained(workload)
        assert planned.plan is not None
        plan = planned.plan
        timing = time_in_turns(workload, plan, options.repeats or steps, progress, options.verify)
    device = model_device(workload.model)
    del workload
    outcomes = _train_under_limit(factory, plan, options, device) if options.hard_limit else {}
    report = _with_arena(report_of(plan, planned, timing, reference, outcomes), factory, plan, device, options)
    if reference is None:
        return plan, report
    verdict = judge(factory, plan, reference, planned, device, progress)
    return plan, replace(report, **asdict(verdict))


def _with_arena(
    report: TrainingReport,
    factory: WorkloadFactory,
    plan: Plan | None,
    device: torch.device,
    options: TrainingOptions,
) -> TrainingReport:
    if not options.arena:
        return report
    return replace(report, **asdict(train_on_arena(factory, plan, device, options)))


def _train_under_limit(
    factory: WorkloadFactory, plan: Plan, options: TrainingOptions, device: torch.device
) -> dict[str, LimitedOutcome]:
    """Planned and plain training, and with an arena training on that, in processes with the same limit."""
    from ...torchtools.device_memory import give_memory_back

    give_memory_back(device)  # or those processes could not use what this one's allocator caches
    job = LimitedJob(factory, plan, plan.budget_bytes or plan.predicted_peak_bytes, options.steps)
    planned = train_limited(job, options.progress)
    alike = replace(job, in_core_peak_bytes=plan.in_core_peak_bytes, slack_bytes=planned.slack_bytes)
    outcomes = {"plain": train_limited(replace(alike, plan=None), options.progress), "planned": planned}
    if options.arena:
        outcomes["arena"] = train_limited(replace(alike, on_arena=True), options.progress)
    return outcomes


def optimize(
    factory: WorkloadFactory,
    budget: int | str,
    options: PlanOptions = PlanOptions(region="step"),  # noqa: B008 - frozen
    *,
    ranks: int = 1,
    mode: Mode = "auto",
    memory_limit: int | str | None = None,
    **training: Any,
) -> Optimized:
    """Profile a workload, plan it under a budget, train it under the plan, and measure the training.

    If the measured peak exceeds the budget by more than the allocator's rounding, plan again for that many bytes less
    and measure again, at most twice. If memory runs out, the step is repeated under a tighter plan, see `Guard`.

    Args:
        factory: builds the workload.
        budget: as `pooch.plan` takes it.
        options: for each plan.
        ranks: processes that copy over the same link at the same time.
        mode: how to profile, as `pooch.profile` takes it.
        memory_limit: while profiling, as `pooch.profile` takes it.
        **training: fields of `TrainingOptions`; `when_trained` is called after each training under a plan.

    Raises:
        InfeasibleBudget: no plan fits.
    """
    how = TrainingOptions(**training)
    check_budget(budget)  # before a step is measured in vain
    profiling: dict[str, Any] = {"mode": mode, "memory_limit": memory_limit, "repeats": how.repeats or 1}
    profile = profile_workload(factory(), progress=how.progress, **profiling)
    shared = profile.shared_by(ranks)
    budget_bytes = budget_in_bytes(shared, budget, options)

    def plan_within(target_bytes: int) -> Plan:
        made = plan_with(
            shared,
            target_bytes,
            options,
            progress=lambda text, share: how.progress(f"planning: {text} ({share:.0%})"),
            aside=is_worthwhile(shared),
        )
        return replace(made, budget_bytes=budget_bytes)

    target_bytes, planned = budget_bytes, plan_within(budget_bytes)
    repairs_in_training = 0
    for repairs in range(MOST_REPAIRS + 1):
        plan, report = _measure_plan(factory, planned, how, plan_within)
        repairs_in_training += report.repairs
        result = Optimized(profile, plan, replace(report, repairs=repairs + repairs_in_training))
        if report.excess_bytes <= 0 or repairs == MOST_REPAIRS:
            return result
        how.progress(
            f"the measured peak exceeds the budget by {report.excess_bytes} bytes: planning for that much less"
        )
        target_bytes -= report.excess_bytes
        try:
            planned = plan_within(max(1, target_bytes))
        except InfeasibleBudget:
            return result  # whose report says by how much the peak exceeds the budget
    raise AssertionError("unreachable: the last round returns")
