"""Lowers decisions to a schedule, and verifies schedules before they are executed. No torch."""

from .lowering import Lowering, lower
from .verifier import verify

__all__ = ["Lowering", "lower", "verify"]
