"""The planner: decides per activation between keep, swap and recompute. Needs neither torch nor a GPU."""

from .contract import Effort, Evaluation, Evaluator, PlanningRequest, Policy, PolicyOutcome
from .options import described, option_names
from .planner import make_plan, smallest_plan_bytes, write_program
from .policies import SEARCHES, find_policy, policy_names

__all__ = [
    "SEARCHES",
    "Effort",
    "Evaluation",
    "Evaluator",
    "PlanningRequest",
    "Policy",
    "PolicyOutcome",
    "described",
    "find_policy",
    "make_plan",
    "option_names",
    "policy_names",
    "smallest_plan_bytes",
    "write_program",
]
