"""Plan -> Schedule, and the verifier without whose word no schedule is executed. No torch."""

from pooch.schedule.lowering import Lowering, lower

__all__ = ["Lowering", "lower"]
