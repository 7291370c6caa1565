"""The only composition of the stages: profile -> plan -> simulate | apply -> measure.

Importing this imports no torch: what needs it is imported when it is called, so that saved profiles can be planned and
simulated on any laptop.
"""

from pooch.session.comparison import ComparisonRow, compare, policy_names
from pooch.session.planning import plan, plan_from_decisions
from pooch.session.simulation import simulate, simulate_in_core

__all__ = ["ComparisonRow", "compare", "plan", "plan_from_decisions", "policy_names", "simulate", "simulate_in_core"]
