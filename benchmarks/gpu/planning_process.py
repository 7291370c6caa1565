"""Planning in a process of its own: imports no torch, so several budgets can be planned beside one another."""

from __future__ import annotations

from pooch.api.planning import plan
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile


def plan_or_smallest(profile: Profile, budget: str, seconds: float) -> Plan:
    """The plan under a budget, or under the smallest feasible one."""
    try:
        return plan(profile, budget, region="step", time_limit_s=seconds)
    except InfeasibleBudget as error:
        return plan(profile, error.minimum_bytes, region="step", time_limit_s=seconds)
