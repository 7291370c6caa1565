"""Which ops methods treat as dear: convolutions and matrix products, told by name."""

from __future__ import annotations

from ...analysis.dataflow import Dataflow

CONVOLUTIONS = ("conv",)
PRODUCTS = ("mm", "linear", "matmul", "attention", "lstm", "gru")


def heavy_ops(dataflow: Dataflow) -> frozenset[int]:
    """Forward ops that are convolutions; in a step without any, its matrix products and recurrent layers."""
    forward = dataflow.profile.ops[: dataflow.profile.forward_ops]
    for words in (CONVOLUTIONS, PRODUCTS):
        found = frozenset(op.index for op in forward if any(word in op.name for word in words))
        if found:
            return found
    return frozenset()
