"""Sampling at positions of a grid, and blocks that are put back into an image."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation, integers
from ..registry import UnsupportedVariant, operator

_MODES = {"linear": "bilinear", "cubic": "bicubic"}  # the names since opset 20


@operator("GridSample")
def _grid_sample(op: Operation, x: Tensor, grid: Tensor) -> Tensor:
    mode = op.get("mode", "bilinear" if op.opset < 20 else "linear")
    return functional.grid_sample(
        x, grid, _MODES.get(mode, mode), op.get("padding_mode", "zeros"), bool(op.get("align_corners", 0))
    )


@operator("AffineGrid", host=(1,))
def _affine_grid(op: Operation, theta: Tensor, size: HostNumbers) -> Tensor:
    return functional.affine_grid(theta, integers(size), bool(op.get("align_corners", 0)))


@operator("Col2Im", host=(1, 2))
def _col_to_im(op: Operation, x: Tensor, size: HostNumbers, block: HostNumbers) -> Tensor:
    kernel, pads = tuple(integers(block)), tuple(op.get("pads", (0, 0, 0, 0)))
    if len(kernel) != 2 or pads[:2] != pads[2:]:
        raise UnsupportedVariant("blocks that are no rectangles, or padding that differs between the sides")
    strides, dilations = tuple(op.get("strides", (1, 1))), tuple(op.get("dilations", (1, 1)))
    return functional.fold(x, tuple(integers(size)), kernel, dilations, pads[:2], strides)
