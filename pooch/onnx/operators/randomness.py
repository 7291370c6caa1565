"""Random numbers. They are drawn from PyTorch's generator in every step, whatever seed the file names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import Operation
from ..registry import operator
from ..types import torch_type


def _dtype(op: Operation, like: Tensor) -> torch.dtype:
    code = op.get("dtype")
    return like.dtype if code is None else torch_type(code)


@operator("RandomNormalLike", folds=False, ignores=("seed",))
def _normal_like(op: Operation, x: Tensor) -> Tensor:
    drawn = torch.randn_like(x, dtype=_dtype(op, x), requires_grad=False)
    mean, scale = op.get("mean", 0.0), op.get("scale", 1.0)
    return drawn if (mean, scale) == (0.0, 1.0) else drawn * scale + mean


@operator("RandomUniformLike", folds=False, ignores=("seed",))
def _uniform_like(op: Operation, x: Tensor) -> Tensor:
    drawn = torch.rand_like(x, dtype=_dtype(op, x), requires_grad=False)
    low, high = op.get("low", 0.0), op.get("high", 1.0)
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


@operator("Bernoulli", folds=False, ignores=("seed",))
def _bernoulli(op: Operation, x: Tensor) -> Tensor:
    return torch.bernoulli(x).to(_dtype(op, x))
