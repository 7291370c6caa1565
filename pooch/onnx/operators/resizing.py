"""Resizing, in the forms that PyTorch computes the same way."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation
from ..registry import UnsupportedVariant, operator

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@operator("Resize", host=(1, 2, 3))
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
    return _interpolated(op, x, coordinates, scales, sizes)


@operator("Upsample", host=(1,))
def _upsample(op: Operation, x: Tensor, scales: HostNumbers) -> Tensor:
    return _interpolated(op, x, "asymmetric", scales, None)


def _interpolated(
    op: Operation, x: Tensor, coordinates: str, scales: HostNumbers | None, sizes: HostNumbers | None
) -> Tensor:
    if op.get("axes") is not None or op.get("antialias", 0) or op.get("exclude_outside", 0):
        raise UnsupportedVariant("axes, antialias or exclude_outside")
    if op.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnsupportedVariant("keep_aspect_ratio_policy")
    mode, align = _mode(op, x.dim() - 2, coordinates)
    if scales is not None and scales.numel():
        factors = [float(factor) for factor in scales.tolist()]
        _keeps_front(factors[:2], [1.0, 1.0])
        return functional.interpolate(x, scale_factor=factors[2:], mode=mode, align_corners=align)
    if sizes is None:
        raise UnsupportedVariant("neither scales nor sizes")
    wanted = [int(size) for size in sizes.tolist()]
    _keeps_front(wanted[:2], list(x.shape[:2]))
    return functional.interpolate(x, size=wanted[2:], mode=mode, align_corners=align)


def _keeps_front(given: list[float] | list[int], expected: list[float] | list[int]) -> None:
    if given != expected:
        raise UnsupportedVariant("a change of batch or channels")


def _mode(op: Operation, rank: int, coordinates: str) -> tuple[str, bool | None]:
    mode = op.get("mode", "nearest")
    rounding = op.get("nearest_mode", "round_prefer_floor" if op.opset >= 11 else "floor")
    if mode == "nearest" and coordinates == "asymmetric" and rounding == "floor":
        return "nearest", None
    aligned = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}.get(coordinates)
    if aligned is None or mode == "nearest":
        raise UnsupportedVariant(f"mode {mode!r} with coordinates {coordinates!r} and rounding {rounding!r}")
    if mode == "cubic" and rank == 2 and op.get("cubic_coeff_a", -0.75) == -0.75:
        return "bicubic", aligned
    if mode == "linear" and rank in _LINEAR:
        return _LINEAR[rank], aligned
    raise UnsupportedVariant(f"mode {mode!r} over {rank} axes")
