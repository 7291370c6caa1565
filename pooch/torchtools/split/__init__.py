"""Operators that run in slices, where that is bitwise the same: cross entropy over a vocabulary, row by row."""

from .calls import LossCall, SplitCalls, judging_writes, splittable, watching_losses
from .loss import in_plain_operators, may_be_written_over, slice_rows, split_cross_entropy
from .verification import difference_from_plain, on_random_numbers

__all__ = [
    "LossCall",
    "SplitCalls",
    "difference_from_plain",
    "in_plain_operators",
    "judging_writes",
    "may_be_written_over",
    "on_random_numbers",
    "slice_rows",
    "split_cross_entropy",
    "splittable",
    "watching_losses",
]
