"""Lets an optimizer step one slice of its parameters after the other, with the same bits as all at once."""

from .diversion import plain_step
from .needs import StepNeeds, needs_of
from .slices import OptimizerSlices

__all__ = ["OptimizerSlices", "StepNeeds", "needs_of", "plain_step"]
