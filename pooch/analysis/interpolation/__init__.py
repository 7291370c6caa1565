"""A profile for input shapes that were never profiled, from profiles of other shapes."""

from __future__ import annotations

from .carrying import carried_over
from .step import Interpolation, KnownStep, interpolated_profile

__all__ = ["Interpolation", "KnownStep", "carried_over", "interpolated_profile"]
