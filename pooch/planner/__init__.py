"""The planner: decides per activation between keep, swap and recompute. Needs neither torch nor a GPU.

What plans is imported on first use, and the solver with it: a process that trains and plans in another one never
imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .contract import Effort, Evaluation, Evaluator, MakeRule, PlanningRequest, Policy, PolicyOutcome
from .options import described, option_names

if TYPE_CHECKING:
    from .joint import JointSolution, fitted, joint_program, single_changes, solve_jointly
    from .planner import make_plan, smallest_plan_bytes, write_program
    from .policies import SEARCHES, find_policy, policy_names

__all__ = [
    "SEARCHES",
    "Effort",
    "Evaluation",
    "Evaluator",
    "JointSolution",
    "MakeRule",
    "PlanningRequest",
    "Policy",
    "PolicyOutcome",
    "described",
    "find_policy",
    "fitted",
    "joint_program",
    "make_plan",
    "option_names",
    "policy_names",
    "single_changes",
    "smallest_plan_bytes",
    "solve_jointly",
    "write_program",
]

_HOMES = dict.fromkeys(("SEARCHES", "find_policy", "policy_names"), "policies")
_HOMES |= dict.fromkeys(
    ("JointSolution", "fitted", "single_changes", "joint_program", "solve_jointly"), "joint"
)  # the others are in `planner`


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'planner')}", __package__), name)
