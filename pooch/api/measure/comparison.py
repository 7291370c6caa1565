"""Every policy under every budget, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ground.errors import InfeasibleBudget, UsageError
from ...ground.progress import PlanningProgress, silent
from ...ir import Plan, Profile
from ...planner import described, policy_names
from ...workloads.loading import WorkloadFactory
from ..options import PlanOptions
from ..planning import plan_with
from ..smallest import budget_in_bytes
from .timing import time_in_turns
from .training import train_steps


@dataclass(frozen=True, slots=True)
class Measured:
    """A training under a plan.

    Attributes:
        peak_bytes: the highest of all steps.
        step_ms: median of the planned steps.
        plain_step_ms: median of plain steps that took turns with them; None if they do not fit in-core.
        reserved_bytes: highest bytes that a caching allocator reserved; None on a CPU.
        ratios: of each turn, the planned step by the plain step; empty if plain steps do not fit in-core.
    """

    peak_bytes: int
    step_ms: float
    plain_step_ms: float | None
    reserved_bytes: int | None = None
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One policy under one budget.

    Attributes:
        budget_bytes: the budget.
        policy: the policy with its parameters.
        plan: None if no plan fits.
        minimum_bytes: the smallest budget that the policy can keep if no plan fits, else 0.
        measured: the training under the plan, if there was one.
    """

    budget_bytes: int
    policy: str
    plan: Plan | None
    minimum_bytes: int = 0
    measured: Measured | None = None


def compare(
    profile: Profile,
    budgets: Sequence[int | str],
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    *,
    policies: Sequence[str] = (),
    policy_options: Mapping[str, Mapping[str, object]] | None = None,
    progress: PlanningProgress = silent,
) -> tuple[ComparisonRow, ...]:
    """Plan a profile under each budget by each policy.

    Budgets are planned in ascending order, and the integer program knows its plans for the smaller ones, so that in a
    comparison more memory is never slower.

    Args:
        profile: the measured step.
        budgets: as `plan` takes them; "min" is the smallest one of each policy.
        options: for each plan, but for the policy and its parameters.
        policies: names. Empty: all policies.
        policy_options: parameters of each policy, by its name.
        progress: called with what is being done and the share that is done.

    Raises:
        UsageError: a budget, a policy or a parameter is invalid, or there is no budget.
    """
    if not budgets:
        raise UsageError("nothing to compare: give at least one budget, such as --budget 60%")
    chosen = tuple(policies) or policy_names()
    parameters = policy_options or {}
    for name in parameters:
        if name not in chosen:
            raise UsageError(f"options for policy {name!r}, which is not compared: choose it with --policy")
    options_of = {
        policy: replace(options, policy=policy, policy_options=parameters.get(policy, {}), explain=False)
        for policy in chosen
    }
    asked = [(budget_in_bytes(profile, budget, options_of[policy]), policy) for budget in budgets for policy in chosen]
    todo = sorted(set(asked), key=lambda each: (each[0], chosen.index(each[1])))
    rows: dict[tuple[int, str], ComparisonRow] = {}
    for done, (budget_bytes, policy) in enumerate(todo):
        progress(f"policy {policy}", done / len(todo))
        known = [row.plan for (_, name), row in rows.items() if name == policy == "ilp" and row.plan is not None]
        rows[budget_bytes, policy] = _row(profile, budget_bytes, options_of[policy], known)
    return tuple(rows[each] for each in asked)


def _row(profile: Profile, budget_bytes: int, options: PlanOptions, known: Sequence[Plan]) -> ComparisonRow:
    name = described(options.policy, options.policy_options)
    try:
        return ComparisonRow(budget_bytes, name, plan_with(profile, budget_bytes, options, known=known))
    except InfeasibleBudget as error:
        return ComparisonRow(budget_bytes, name, None, error.minimum_bytes)


def measure_rows(
    rows: Sequence[ComparisonRow], factory: WorkloadFactory, *, steps: int = 3, progress: PlanningProgress
) -> tuple[ComparisonRow, ...]:
    """Train for a few steps under each plan in this process, and time planned steps in turns with plain ones.

    Raises:
        PlanMismatch: the profile is of another workload.
    """
    from ...executor.engines.pinned import blocks_kept

    measured = []
    with blocks_kept():
        for done, row in enumerate(rows):
            progress(f"measuring {row.policy}", done / len(rows))
            measured.append(_measured_row(row, factory, steps))
    return tuple(measured)


def _measured_row(row: ComparisonRow, factory: WorkloadFactory, steps: int) -> ComparisonRow:
    if row.plan is None:
        return row
    workload = factory()
    trained = train_steps(workload, row.plan, steps, silent)
    timing = time_in_turns(workload, row.plan, steps, silent)
    turns = zip(timing.planned_samples_ms, timing.plain_samples_ms, strict=False)
    ratios = tuple(planned_ms / plain_ms for planned_ms, plain_ms in turns)
    measured = Measured(trained.peak_bytes, timing.planned_ms, timing.plain_ms, trained.reserved_bytes, ratios)
    return replace(row, measured=measured)
