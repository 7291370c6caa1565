"""Schedule + model -> a training step. The executor carries out the actions of the schedule and decides nothing."""

from .apply import apply_plan
from .run import Run, StepMemory
from .statistics import RunStats, RunTotals

__all__ = ["Run", "RunStats", "RunTotals", "StepMemory", "apply_plan"]
