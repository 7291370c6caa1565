"""Training under a budget without a plan made beforehand: `pooch.auto`."""

from .autopilot import Auto, auto
from .summary import AutoSummary, PlannedShape

__all__ = ["Auto", "AutoSummary", "PlannedShape", "auto"]
