"""Operators that run in slices, where that is bitwise the same: cross entropy over a vocabulary, row by row."""

from .calls import LossCall, SplitCalls, judging_writes, splittable, watching_losses
from .loss import may_be_written_over, slice_rows, split_cross_entropy
from .verification import difference_from_plain

__all__ = [
    "LossCall",
    "SplitCalls",
    "difference_from_plain",
    "judging_writes",
    "may_be_written_over",
    "slice_rows",
    "split_cross_entropy",
    "splittable",
    "watching_losses",
]
