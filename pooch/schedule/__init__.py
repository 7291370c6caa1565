"""Lowers decisions to schedules, and verifies schedules before they are executed. Does not import torch."""

from .lowering import Lowering, lower
from .residence_check import verify_residence
from .verifier import verify

__all__ = ["Lowering", "lower", "verify", "verify_residence"]
