"""Schedule + model -> a training step. The executor carries out the actions of the schedule and decides nothing."""

from pooch.executor.apply import apply_plan
from pooch.executor.run import Run
from pooch.executor.statistics import RunStats, RunTotals

__all__ = ["Run", "RunStats", "RunTotals", "apply_plan"]
