"""Lowers decisions to a schedule, and verifies schedules before they are executed. No torch."""

from pooch.schedule.lowering import Lowering, lower
from pooch.schedule.verifier import verify

__all__ = ["Lowering", "lower", "verify"]
