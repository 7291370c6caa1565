"""Pooling operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation, integers
from ..registry import UnsupportedVariant, operator
from .windows import Windows, of_rank, windows_of

_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MAX_WITH_INDICES = (
    functional.max_pool1d_with_indices, functional.max_pool2d_with_indices, functional.max_pool3d_with_indices,
)  # fmt: skip
_AVERAGE = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _fits_torch(windows: Windows) -> bool:
    """Whether PyTorch can pad: both sides equally, and by at most half of the kernel."""
    pairs = zip(windows.before, windows.kernel, strict=True)
    return windows.is_symmetric and all(width <= kernel // 2 for width, kernel in pairs)


@operator("MaxPool")
def _max_pool(op: Operation, x: Tensor) -> Any:
    windows = windows_of(op, x, list(op.get("kernel_shape")))
    padding = windows.before
    if op.reads(1) and (not _fits_torch(windows) or op.get("storage_order", 0)):
        raise UnsupportedVariant("its second output (indices) with unequal padding or in column major order")
    if not _fits_torch(windows):
        x, padding = windows.pad(x, float("-inf")), [0] * len(padding)
    ceil_mode = bool(op.get("ceil_mode", 0))
    how = windows.kernel, windows.strides, padding, windows.dilations, ceil_mode
    if not op.reads(1):
        return of_rank(_MAX, len(windows.kernel))(x, *how)
    pooled, indices = of_rank(_MAX_WITH_INDICES, len(windows.kernel))(x, *how)
    return pooled, indices + _first_of_planes(x)


def _first_of_planes(x: Tensor) -> Tensor:
    """The index of the first element of each channel: ONNX counts through the tensor, PyTorch through the channel."""
    batch, channels, *sizes = x.shape
    shape = [batch, channels] + [1] * len(sizes)
    return (torch.arange(batch * channels, device=x.device) * math.prod(sizes)).reshape(shape)


@operator("MaxUnpool", host=(2,))
def _max_unpool(op: Operation, x: Tensor, indices: Tensor, size: HostNumbers | None = None) -> Tensor:
    windows = windows_of(op, x, list(op.get("kernel_shape")))
    each = zip(x.shape[2:], windows.strides, windows.kernel, windows.before, windows.after, strict=True)
    sizes = [(count - 1) * stride + kernel - before - after for count, stride, kernel, before, after in each]
    if size is not None and integers(size)[2:] != sizes:
        raise UnsupportedVariant("a size other than that of the windows")
    plane = math.prod(sizes)
    flat = x.new_zeros((*x.shape[:2], plane)).scatter(2, (indices % plane).flatten(2), x.flatten(2))
    return flat.reshape((*x.shape[:2], *sizes))


@operator("LpPool")
def _lp_pool(op: Operation, x: Tensor) -> Tensor:
    windows, power = windows_of(op, x, list(op.get("kernel_shape"))), op.get("p", 2)
    if any(dilation != 1 for dilation in windows.dilations) or op.get("ceil_mode", 0):
        raise UnsupportedVariant("dilations or ceil_mode")
    pool = of_rank(_AVERAGE, len(windows.kernel))
    means = pool(windows.pad(x.abs().pow(power), 0.0), windows.kernel, windows.strides)
    return (means * math.prod(windows.kernel)).pow(1 / power)


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


@operator("GlobalLpPool")
def _global_lp_pool(op: Operation, x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, op.get("p", 2), list(range(2, x.dim())), keepdim=True)
    return length
