"""Lowers decisions to schedules, and verifies schedules before they are executed. Does not import torch."""

from .lowering import Lowering, lower
from .verifier import verify

__all__ = ["Lowering", "lower", "verify"]
