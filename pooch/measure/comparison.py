"""Every policy under every budget, side by side: plans, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pooch.api.planning import budget_in_bytes, plan
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Plan, Profile, Region
from pooch.measure.training import time_in_turns, train_steps
from pooch.planner import described, policy_names
from pooch.progress import silent
from pooch.workloads.loading import WorkloadFactory


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan as it was trained: highest peak, and medians of plain and planned steps that took turns, in ms; no plain
    ones where they do not fit in-core. `reserved_bytes`: the most that a caching allocator took; None on a CPU.
    """

    peak_bytes: int
    step_ms: float
    plain_step_ms: float | None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One policy under one budget.

    Attributes:
        budget_bytes: asked for. policy: who decided.
        plan: what came out, or None where nothing fits.
        minimum_bytes: the smallest budget that the policy can keep, where nothing fits; else 0.
        measured: how it trained, where that was asked for.
    """

    budget_bytes: int
    policy: str
    plan: Plan | None
    minimum_bytes: int = 0
    measured: Measured | None = None


def compare(
    profile: Profile,
    budgets: Sequence[int | str],
    *,
    policies: Sequence[str] = (),
    policy_options: Mapping[str, Mapping[str, object]] | None = None,
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    region: Region = "model",
    progress: Callable[[str, float], None] | None = None,
) -> tuple[ComparisonRow, ...]:
    """Plan the profile under each budget by each policy (all of them where none is named).

    Budgets are planned from the smallest on, and the integer program knows its own plans for the smaller ones: in a
    comparison more memory is never slower.

    Args:
        budgets: as `plan` takes them; "min" is each policy's own.
        policy_options: by policy, its parameters. The others are those of `plan`.

    Raises:
        UsageError: a budget, a policy or a parameter cannot be understood, or there is no budget.
    """
    if not budgets:
        raise UsageError("nothing to compare: give at least one budget, such as --budget 60%")
    chosen = tuple(policies) or policy_names()
    options = policy_options or {}
    for name in options:
        if name not in chosen:
            raise UsageError(f"options for policy {name!r}, which is not compared: choose it with --policy")
    asked = [
        (_budget_of(profile, budget, policy, options, host_budget, region), policy)
        for budget in budgets
        for policy in chosen
    ]
    todo = sorted(set(asked), key=lambda each: (each[0], chosen.index(each[1])))
    rows: dict[tuple[int, str], ComparisonRow] = {}
    for done, (budget_bytes, policy) in enumerate(todo):
        if progress is not None:
            progress(f"policy {policy}", done / len(todo))
        rows[budget_bytes, policy] = _row(
            profile,
            budget_bytes,
            policy,
            policy_options=options.get(policy, {}),
            host_budget=host_budget,
            time_limit_s=time_limit_s,
            region=region,
            known=[row.plan for (_, name), row in rows.items() if name == policy == "ilp" and row.plan is not None],
        )
    return tuple(rows[each] for each in asked)


def _budget_of(
    profile: Profile,
    budget: int | str,
    policy: str,
    options: Mapping[str, Mapping[str, object]],
    host_budget: int | str | None,
    region: Region,
) -> int:
    """Each policy has its own smallest budget."""
    return budget_in_bytes(
        profile,
        budget,
        policy=policy,
        policy_options=options.get(policy, {}),
        host_budget=host_budget,
        region=region,
    )


def measure_rows(
    rows: Sequence[ComparisonRow], factory: WorkloadFactory, *, steps: int = 3, progress: Callable[[str, float], None]
) -> tuple[ComparisonRow, ...]:
    """Train each plan for some steps in this process, and time it in turns with plain steps.

    Raises:
        PlanMismatch: the profile is not one of this workload.
    """
    from pooch.executor.engines.pinned import blocks_kept

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
    measured = Measured(trained.peak_bytes, timing.planned_ms, timing.plain_ms, trained.reserved_bytes)
    return replace(row, measured=measured)


def _row(profile: Profile, budget_bytes: int, policy: str, **planning: Any) -> ComparisonRow:
    name = described(policy, planning["policy_options"])
    try:
        made = plan(profile, budget_bytes, policy=policy, explain=False, **planning)
    except InfeasibleBudget as error:
        return ComparisonRow(budget_bytes, name, None, error.minimum_bytes)
    return ComparisonRow(budget_bytes, name, made)
