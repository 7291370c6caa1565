"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import operator


@operator("MatMul")
def _matmul(op: Operation, left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left, right)


@operator("Gemm")
def _gemm(op: Operation, left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    alpha, beta = op.get("alpha", 1.0), op.get("beta", 1.0)
    left = left.t() if op.get("transA", 0) else left
    if alpha == beta == 1.0 and (added is None or added.dim() == 1):  # a linear layer
        return functional.linear(left, right if op.get("transB", 0) else right.t(), added)
    product = left @ (right.t() if op.get("transB", 0) else right)
    product = product if alpha == 1.0 else alpha * product
    if added is None:
        return product
    return product + (added if beta == 1.0 else beta * added)


@operator("Einsum")
def _einsum(op: Operation, *inputs: Tensor) -> Tensor:
    return torch.einsum(op.get("equation"), *inputs)
