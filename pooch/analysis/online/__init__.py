"""A step that runs without a plan and evicts by a rule, simulated on its profile."""

from .rules import Cheapest, Dtr
from .step import OnlineStep, run_online

__all__ = ["Cheapest", "Dtr", "OnlineStep", "run_online"]
