"""Lets an optimizer step one slice of its parameters after the other, with the same bits as all at once."""

from .cutting import Load
from .diversion import plain_step
from .needs import StepNeeds, needs_of
from .slices import OptimizerSlices

__all__ = ["Load", "OptimizerSlices", "StepNeeds", "needs_of", "plain_step"]
