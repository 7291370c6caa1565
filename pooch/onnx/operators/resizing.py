"""Resizing: by PyTorch's operator where it computes the same, otherwise axis by axis from neighbouring elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation
from ..registry import UnsupportedVariant, operator

Positions = numpy.typing.NDArray[Any]

_MOST_POSITIONS = 1 << 16  # along an axis, where they are listed
_ALIGNED = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_ROUNDED: dict[str, Callable[[Positions], Positions]] = {
    "floor": numpy.floor,
    "ceil": numpy.ceil,
    "round_prefer_floor": lambda positions: numpy.ceil(positions - numpy.float32(0.5)),
    "round_prefer_ceil": lambda positions: numpy.floor(positions + numpy.float32(0.5)),
}


@operator("Resize", host=(1, 2, 3), ignores=("cubic_coeff_a", "extrapolation_value", "nearest_mode"))
def _resize(
    op: Operation,
    x: Tensor,
    region: HostNumbers | None = None,
    scales: HostNumbers | None = None,
    sizes: HostNumbers | None = None,
) -> Tensor:
    if op.opset < 11:
        scales, region = region, None
    coordinates = op.get("coordinate_transformation_mode", "asymmetric" if op.opset < 11 else "half_pixel")
    return _resized(op, x, coordinates, scales, sizes)


@operator("Upsample", host=(1,))
def _upsample(op: Operation, x: Tensor, scales: HostNumbers) -> Tensor:
    return _resized(op, x, "asymmetric", scales, None)


@dataclass(frozen=True, slots=True)
class _Target:
    """What is asked for, by axis.

    Attributes:
        sizes: of the result.
        factors: of the result's elements to the input's.
        is_whole: whether factors are those of the sizes, and batch and channels stay.
    """

    sizes: list[int]
    factors: list[float]
    is_whole: bool


def _target(op: Operation, x: Tensor, scales: HostNumbers | None, sizes: HostNumbers | None) -> _Target:
    axes = op.axes(x.dim()) or list(range(x.dim()))
    wanted, factors, is_exact = list(x.shape), [1.0] * x.dim(), True
    if scales is not None and scales.numel():
        for axis, factor in zip(axes, scales.tolist(), strict=True):
            exact = numpy.float32(x.shape[axis]) * numpy.float32(factor)
            factors[axis], wanted[axis] = float(factor), math.floor(exact)
            is_exact = is_exact and wanted[axis] == exact
    elif sizes is not None:
        for axis, size in zip(axes, sizes.tolist(), strict=True):
            factors[axis], wanted[axis] = int(size) / x.shape[axis], int(size)
    else:
        raise UnsupportedVariant("neither scales nor sizes")
    return _Target(wanted, factors, is_exact and wanted[:2] == list(x.shape[:2]))


def _resized(
    op: Operation, x: Tensor, coordinates: str, scales: HostNumbers | None, sizes: HostNumbers | None
) -> Tensor:
    if op.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnsupportedVariant("keep_aspect_ratio_policy")
    mode, target = op.get("mode", "nearest"), _target(op, x, scales, sizes)
    if mode == "nearest":
        return _nearest(op, x, coordinates, target)
    if mode not in ("linear", "cubic"):
        raise UnsupportedVariant(f"mode {mode!r}")
    smooth = bool(op.get("antialias", 0))
    name, aligned = _torch_name(op, x.dim() - 2), _ALIGNED.get(coordinates)
    # Of one element, PyTorch takes the middle of the input, and ONNX the first.
    is_first = coordinates == "pytorch_half_pixel" and 1 in target.sizes[2:]
    if target.is_whole and name is not None and aligned is not None and not is_first:
        return functional.interpolate(x, size=target.sizes[2:], mode=name, align_corners=aligned, antialias=smooth)
    for axis, (size, factor) in enumerate(zip(target.sizes, target.factors, strict=True)):
        if size != x.shape[axis] or factor != 1.0:
            stretch = min(factor, 1.0) if smooth else 1.0
            x = _along(op, x, axis, stretch, _positions(coordinates, x.shape[axis], size, factor))
    return x


def _torch_name(op: Operation, rank: int) -> str | None:
    """The mode of PyTorch's operator that computes this, if any. If that smooths, it leaves out what is outside."""
    mode, smooth, excludes = op.get("mode"), op.get("antialias", 0), op.get("exclude_outside", 0)
    if bool(smooth) != bool(excludes):
        return None
    if mode == "cubic":
        return "bicubic" if rank == 2 and not smooth and op.get("cubic_coeff_a", -0.75) == -0.75 else None
    return _LINEAR.get(rank) if rank == 2 or not smooth else None


def _positions(coordinates: str, length: int, wanted: int, factor: float) -> Positions:
    """Return where the elements of the result lie in the input, as the specification of Resize gives it.

    In single precision, as onnxruntime computes them: between two elements, the last digit decides which is nearer.
    """
    if not 0 < wanted <= _MOST_POSITIONS:
        raise UnsupportedVariant(f"coordinates {coordinates!r} for an axis of {wanted} elements")
    half, one, scale = numpy.float32(0.5), numpy.float32(1), numpy.float32(factor)
    index = numpy.arange(wanted, dtype=numpy.float32)
    half_pixel = (index + half) / scale - half
    origin = index * numpy.float32(0)
    rules: dict[str, Positions] = {
        "half_pixel": half_pixel,
        "half_pixel_symmetric": (one - wanted / (length * scale)) * length * half + half_pixel,  # centre on centre
        "pytorch_half_pixel": half_pixel if wanted > 1 else origin,
        "align_corners": index * numpy.float32(length - 1) / numpy.float32(max(wanted - 1, 1)),
        "asymmetric": index / scale,
        "tf_half_pixel_for_nn": (index + half) / scale,
    }
    if coordinates not in rules:
        raise UnsupportedVariant(f"coordinates {coordinates!r}")
    return rules[coordinates]


def _indices(positions: Positions, length: int, x: Tensor) -> Tensor:
    inside = numpy.clip(positions, 0, length - 1).astype(numpy.int64)
    return torch.tensor(inside.tolist(), device=x.device)


def _nearest(op: Operation, x: Tensor, coordinates: str, target: _Target) -> Tensor:
    rounding = op.get("nearest_mode", "round_prefer_floor" if op.opset >= 11 else "floor")
    if target.is_whole and x.dim() - 2 in _LINEAR and (coordinates, rounding) == ("asymmetric", "floor"):
        return functional.interpolate(x, size=target.sizes[2:], mode="nearest")
    for axis, (size, factor) in enumerate(zip(target.sizes, target.factors, strict=True)):
        length = x.shape[axis]
        if size != length or factor != 1.0:
            nearest = _ROUNDED[rounding](_positions(coordinates, length, size, factor))
            x = x.index_select(axis, _indices(nearest, length, x))
    return x


def _along(op: Operation, x: Tensor, axis: int, stretch: float, positions: Positions) -> Tensor:
    """Return the weighted mean of the elements around each position of one axis.

    Args:
        op: of mode "linear" or "cubic".
        x: to resize.
        axis: to resize along.
        stretch: distance at which the input's elements count as one apart; less than 1 to smooth it (antialias).
        positions: of the result's elements in the input.
    """
    length, first = x.shape[axis], numpy.floor(positions)
    reach = math.ceil((1 if op.get("mode") == "linear" else 2) / stretch)
    offsets = numpy.arange(1 - reach, reach + 1)[:, None]
    weights = _weights(op, numpy.abs((positions - first)[None] - offsets) * stretch)
    if op.get("exclude_outside", 0):  # otherwise the outermost elements stand in for those beyond
        weights[(first + offsets < 0) | (first + offsets >= length)] = 0
    weights /= weights.sum(0)
    shape = [1] * x.dim()
    shape[axis] = len(positions)
    total: Tensor | None = None
    for offset, row in zip(offsets, weights, strict=True):
        part = x.index_select(axis, _indices(first + offset, length, x))
        part = part * torch.tensor(row.tolist(), dtype=x.dtype, device=x.device).reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _weights(op: Operation, distances: Positions) -> Positions:
    """Weights of elements at distances: for mode "cubic" those of Keys, "Cubic convolution interpolation" (1981)."""
    if op.get("mode") == "linear":
        linear: Positions = numpy.maximum(1 - distances, 0.0)
        return linear
    a = op.get("cubic_coeff_a", -0.75)
    near = ((a + 2) * distances - (a + 3)) * distances * distances + 1
    far = ((a * distances - 5 * a) * distances + 8 * a) * distances - 4 * a
    weights: Positions = numpy.where(distances <= 1, near, numpy.where(distances < 2, far, 0.0))
    return weights
