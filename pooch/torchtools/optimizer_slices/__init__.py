"""Lets an optimizer step one slice of its parameters after the other, with the same bits as all at once."""

from .slices import OptimizerSlices

__all__ = ["OptimizerSlices"]
