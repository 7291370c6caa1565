"""Schedule + model -> a training step. The executor looks actions up; it decides nothing."""

from pooch.executor.run import Run, apply_plan
from pooch.executor.statistics import RunStats, RunTotals

__all__ = ["Run", "RunStats", "RunTotals", "apply_plan"]
