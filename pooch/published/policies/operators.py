"""The ops that methods treat as expensive: convolutions and matrix products, identified by name."""

from __future__ import annotations

from ...analysis.dataflow import Dataflow

CONVOLUTIONS = ("conv",)
PRODUCTS = ("mm", "linear", "matmul", "attention", "lstm", "gru")


def heavy_ops(dataflow: Dataflow) -> frozenset[int]:
    """Return the forward ops that are convolutions, or, if there are none, matrix products and recurrent layers."""
    forward = dataflow.profile.ops[: dataflow.profile.forward_ops]
    for words in (CONVOLUTIONS, PRODUCTS):
        found = frozenset(op.index for op in forward if any(word in op.name for word in words))
        if found:
            return found
    return frozenset()
