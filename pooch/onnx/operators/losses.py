"""Losses that are part of a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import operator

_IGNORE_NOTHING = -100


@operator("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(op: Operation, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Any:
    logarithms = functional.log_softmax(scores, 1)
    return _loss(op, logarithms, labels, weights), logarithms


@operator("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(op: Operation, logarithms: Tensor, labels: Tensor, weights: Tensor | None = None) -> Any:
    return _loss(op, logarithms, labels, weights)


def _loss(op: Operation, logarithms: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    ignored, reduction = op.get("ignore_index", _IGNORE_NOTHING), op.get("reduction", "mean")
    return functional.nll_loss(logarithms, labels.long(), weights, ignore_index=ignored, reduction=reduction)
