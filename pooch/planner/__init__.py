"""The planner: decides per activation between keep, swap and recompute. Needs neither torch nor a GPU."""

from pooch.planner.contract import (
    Evaluation,
    Evaluator,
    PlannedDecisions,
    PlanningRequest,
    Policy,
    PolicyOutcome,
    Progress,
)
from pooch.planner.options import described, option_names
from pooch.planner.planning import make_plan, make_plans
from pooch.planner.policies import find_policy, policy_names
from pooch.planner.smallest import smallest_budget

__all__ = [
    "Evaluation",
    "Evaluator",
    "PlannedDecisions",
    "PlanningRequest",
    "Policy",
    "PolicyOutcome",
    "Progress",
    "described",
    "find_policy",
    "make_plan",
    "make_plans",
    "option_names",
    "policy_names",
    "smallest_budget",
]
