"""Pooling operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import UnsupportedVariant, operator
from .windows import Windows, of_rank, windows_of

_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGE = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _fits_torch(windows: Windows) -> bool:
    """Whether PyTorch can pad: both sides equally, and by at most half of the kernel."""
    pairs = zip(windows.before, windows.kernel, strict=True)
    return windows.is_symmetric and all(width <= kernel // 2 for width, kernel in pairs)


@operator("MaxPool")
def _max_pool(op: Operation, x: Tensor) -> Tensor:
    if op.reads(1):
        raise UnsupportedVariant("its second output (indices)")
    windows = windows_of(op, x, list(op.get("kernel_shape")))
    padding = windows.before
    if not _fits_torch(windows):
        x, padding = windows.pad(x, float("-inf")), [0] * len(padding)
    pool = of_rank(_MAX, len(windows.kernel))
    ceil_mode = bool(op.get("ceil_mode", 0))
    pooled: Tensor = pool(x, windows.kernel, windows.strides, padding, windows.dilations, ceil_mode)
    return pooled


@operator("AveragePool")
def _average_pool(op: Operation, x: Tensor) -> Tensor:
    windows = windows_of(op, x, list(op.get("kernel_shape")))
    if any(dilation != 1 for dilation in windows.dilations):
        raise UnsupportedVariant("dilations")
    pool = of_rank(_AVERAGE, len(windows.kernel))
    ceil_mode, counts_padding = bool(op.get("ceil_mode", 0)), bool(op.get("count_include_pad", 0))
    if _fits_torch(windows):
        return pool(x, windows.kernel, windows.strides, windows.before, ceil_mode, counts_padding)
    if ceil_mode:
        raise UnsupportedVariant("ceil_mode with unequal padding")
    averages = pool(windows.pad(x, 0.0), windows.kernel, windows.strides)
    if counts_padding:
        return averages
    shares = pool(windows.pad(torch.ones_like(x), 0.0), windows.kernel, windows.strides)
    return averages / shares


@operator("GlobalAveragePool")
def _global_average_pool(op: Operation, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(op: Operation, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)
