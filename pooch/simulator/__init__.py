"""Profile + Schedule -> Timeline: what a step under a schedule will take in time and memory. No torch."""

from pooch.simulator.simulate import simulate, step_time_ms

__all__ = ["simulate", "step_time_ms"]
