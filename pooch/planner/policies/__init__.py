"""Policies by name: each turns a `PlanningRequest` into a `PolicyOutcome`. One file per policy."""

from pooch.planner.contract import Policy
from pooch.planner.policies.ilp import ilp
from pooch.planner.policies.keep_all import keep_all
from pooch.planner.policies.recompute_all import recompute_all
from pooch.planner.policies.swap_all import swap_all

policies: dict[str, Policy] = {
    "ilp": ilp,
    "keep_all": keep_all,
    "in_core": keep_all,
    "recompute_all": recompute_all,
    "swap_all": swap_all,
}

__all__ = ["policies"]
