"""`pooch run` and `pooch optimize`: train a workload, and report what was measured beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..api.budgets import check_budget
from ..api.options import PlanOptions
from ..api.planning import budget_in_bytes, plan_with
from ..api.planning_aside import is_worthwhile
from ..api.profiling import Mode, profile_workload
from ..errors import InfeasibleBudget
from ..ir import Plan, Profile
from ..progress import Progress, silent
from ..workloads import Workload
from ..workloads.loading import WorkloadFactory
from .arena_training import train_on_arena
from .checking import judge, train_reference
from .hard_limit import LimitedOutcome, train_limited
from .timing import time_in_turns
from .training import train_steps
from .training_report import TrainingReport, plain_report, report_of

if TYPE_CHECKING:
    import torch

    from ..executor.verification import Verify

MOST_REPAIRS = 2


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What to measure in a training.

    Attributes:
        steps: number of steps, each with the optimizer's.
        check: compare bitwise with plain training. If something differs, train plainly once more, to tell training that
            is not repeatable from a plan that is wrong, and then under deterministic algorithms.
        hard_limit: train twice more, plainly and planned, in processes that cannot take more than the budget.
        arena: train once more, with the memory of the steps from one arena; with `check`, compare that, too, and with
            `hard_limit`, train on an arena in such a process.
        when_trained: called with the workload after its last step.
        verify: how closely replays are compared with what they replace, as `pooch.apply` takes it.
        repeats: number of timed steps, plain and planned in turns. None: as many as `steps`.
        progress: called with what is being done.
    """

    steps: int = 3
    check: bool = False
    hard_limit: bool = False
    arena: bool = False
    when_trained: Callable[[Workload], None] | None = None
    verify: Verify = "first"
    repeats: int | None = None
    progress: Progress = silent


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
    from ..torchtools.training_state import model_device

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
    from ..executor.engines.pinned import blocks_kept
    from ..torchtools.training_state import model_device

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
    steps, progress, check, verify = options.steps, options.progress, options.check, options.verify
    outcome = train_on_arena(factory, plan, steps, device, progress, check=check, verify=verify)
    return replace(report, **asdict(outcome))


def _train_under_limit(
    factory: WorkloadFactory, plan: Plan, options: TrainingOptions, device: torch.device
) -> dict[str, LimitedOutcome]:
    """Planned and plain training, and with an arena training on that, in processes with the same limit."""
    from ..torchtools.device_memory import give_memory_back

    steps, progress = options.steps, options.progress
    give_memory_back(device)  # or those processes could not use what this one's allocator caches
    limit = plan.budget_bytes or plan.predicted_peak_bytes
    planned = train_limited(factory, plan, limit, steps, progress)

    def alike(plan_or_none: Plan | None, *, on_arena: bool) -> LimitedOutcome:
        return train_limited(
            factory, plan_or_none, limit, steps, progress,
            in_core_peak_bytes=plan.in_core_peak_bytes, slack_bytes=planned.slack_bytes, on_arena=on_arena,
        )  # fmt: skip

    outcomes = {"plain": alike(None, on_arena=False), "planned": planned}
    return outcomes | ({"arena": alike(plan, on_arena=True)} if options.arena else {})


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
