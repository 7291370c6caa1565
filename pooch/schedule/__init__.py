"""Plan -> Schedule, and the verifier without whose word no schedule is executed. No torch."""

from pooch.schedule.lowering import Lowering, lower
from pooch.schedule.verifier import verify

__all__ = ["Lowering", "lower", "verify"]
