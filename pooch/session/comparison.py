"""Every policy under every budget, side by side: plans, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Plan, Profile, Region
from pooch.planner import policies as policies_by_name
from pooch.session.planning import plan
from pooch.session.training import time_in_turns, train_steps
from pooch.units import parse_budget
from pooch.workloads.loading import WorkloadFactory


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan as it was trained: highest peak, and medians of plain and planned steps that took turns, in ms."""

    peak_bytes: int
    step_ms: float
    plain_step_ms: float


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
    time_limit_s: float = 30.0,
    region: Region = "model",
    progress: Callable[[str, float], None] | None = None,
) -> tuple[ComparisonRow, ...]:
    """Plan the profile under each budget by each policy (all of them where none is named).

    Raises:
        UsageError: a budget or a policy cannot be understood, or there is no budget.
    """
    if not budgets:
        raise UsageError("nothing to compare: give at least one budget, such as --budget 60%")
    chosen = tuple(policies) or policy_names()
    asked = [(parse_budget(budget, profile.peak_bytes), policy) for budget in budgets for policy in chosen]
    rows = []
    for done, (budget_bytes, policy) in enumerate(asked):
        if progress is not None:
            progress(f"policy {policy}", done / len(asked))
        rows.append(_row(profile, budget_bytes, policy, time_limit_s, region))
    return tuple(rows)


def measure_rows(
    rows: Sequence[ComparisonRow], factory: WorkloadFactory, *, steps: int = 3, progress: Callable[[str, float], None]
) -> tuple[ComparisonRow, ...]:
    """Train each plan for some steps in this process, and time it in turns with plain steps.

    Raises:
        PlanMismatch: the profile is not one of this workload.
    """
    measured = []
    for done, row in enumerate(rows):
        progress(f"measuring {row.policy}", done / len(rows))
        measured.append(_measured_row(row, factory, steps))
    return tuple(measured)


def _measured_row(row: ComparisonRow, factory: WorkloadFactory, steps: int) -> ComparisonRow:
    if row.plan is None:
        return row
    workload = factory()
    peak_bytes = train_steps(workload, row.plan, steps, _silent).peak_bytes
    timing = time_in_turns(workload, row.plan, steps, _silent)
    return replace(row, measured=Measured(peak_bytes, timing.planned_ms, timing.plain_ms))


def _silent(text: str) -> None:
    """Single steps are not told."""


def policy_names() -> tuple[str, ...]:
    """Every policy once, by its first name: the integer program first, as the registry has them."""
    named = {policy: name for name, policy in reversed(policies_by_name.items())}
    return tuple(name for name, policy in policies_by_name.items() if named[policy] == name)


def _row(profile: Profile, budget_bytes: int, policy: str, time_limit_s: float, region: Region) -> ComparisonRow:
    try:
        made = plan(profile, budget_bytes, policy=policy, time_limit_s=time_limit_s, region=region)
    except InfeasibleBudget as error:
        return ComparisonRow(budget_bytes, policy, None, error.minimum_bytes)
    return ComparisonRow(budget_bytes, policy, made)
