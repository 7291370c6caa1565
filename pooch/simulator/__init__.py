"""Predicts what a step under a schedule takes in time and memory. No torch."""

from .simulate import simulate, step_time_ms

__all__ = ["simulate", "step_time_ms"]
