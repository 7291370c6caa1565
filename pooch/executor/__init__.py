"""Schedule + model -> a training step. The executor carries out the actions of the schedule and decides nothing."""

from .apply import apply_plan
from .run import Run
from .statistics import RunStats, RunTotals

__all__ = ["Run", "RunStats", "RunTotals", "apply_plan"]
