"""Convolutions and their transposes, over one to three axes."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import UnsupportedVariant, operator
from .windows import of_rank, windows_of

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSES = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


@operator("Conv", ignores=("kernel_shape",))
def _conv(op: Operation, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    windows = windows_of(op, x, list(weight.shape[2:]))
    padding = windows.before
    if not windows.is_symmetric:
        x, padding = windows.pad(x, 0.0), [0] * len(windows.kernel)
    convolve = of_rank(_CONVOLUTIONS, len(windows.kernel))
    return convolve(x, weight, bias, windows.strides, padding, windows.dilations, op.get("group", 1))


@operator("ConvTranspose", ignores=("kernel_shape",))
def _conv_transpose(op: Operation, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if op.get("output_shape") is not None or op.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedVariant("an output_shape or automatic padding")
    windows = windows_of(op, x, list(weight.shape[2:]))
    rank = len(windows.kernel)
    extra = list(op.get("output_padding", [0] * rank))
    # The two sides are cropped differently: crop here what PyTorch leaves.
    padding = [min(pair) for pair in zip(windows.before, windows.after, strict=True)]
    result = of_rank(_TRANSPOSES, rank)(
        x, weight, bias, windows.strides, padding, extra, op.get("group", 1), windows.dilations
    )
    for axis, (first, last, cut) in enumerate(zip(windows.before, windows.after, padding, strict=True), start=2):
        result = result.narrow(axis, first - cut, result.shape[axis] - (first - cut) - (last - cut))
    return result
