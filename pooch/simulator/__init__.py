"""Predicts what a step under a schedule takes in time and memory. No torch."""

from pooch.simulator.simulate import simulate, step_time_ms

__all__ = ["simulate", "step_time_ms"]
