"""Operators that change the shape or type of a tensor, or create tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation, integers, number
from ..registry import UnsupportedVariant, operator
from ..types import torch_type


@operator("Identity")
def _identity(op: Operation, x: Tensor) -> Tensor:
    return x


@operator("Cast")
def _cast(op: Operation, x: Tensor) -> Tensor:
    return x.to(torch_type(op.get("to")))


@operator("CastLike", contents=(0,))
def _cast_like(op: Operation, x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


@operator("Shape", contents=())
def _shape(op: Operation, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[op.get("start", 0) : op.get("end")], dtype=torch.int64)


@operator("Size", contents=())
def _size(op: Operation, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Constant", contents=())
def _constant(op: Operation) -> Tensor:
    if op.get("value") is not None:
        tensor: Tensor = op.get("value")
        return tensor
    for name, dtype in (("float", torch.float32), ("int", torch.int64)):
        for plural in ("", "s"):
            if (value := op.get(f"value_{name}{plural}")) is not None:
                return torch.tensor(value, dtype=dtype)
    raise UnsupportedVariant("a constant that is text or a sparse tensor")


@operator("ConstantOfShape", host=(0,))
def _constant_of_shape(op: Operation, shape: HostNumbers) -> Tensor:
    value = op.get("value")
    filling, dtype = (0.0, torch.float32) if value is None else (value.reshape(-1)[0].item(), value.dtype)
    return torch.full(integers(shape), filling, dtype=dtype)


@operator("Range", host=(0, 1, 2))
def _range(op: Operation, start: HostNumbers, limit: HostNumbers, step: HostNumbers) -> Tensor:
    return torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


@operator("EyeLike")
def _eye_like(op: Operation, x: Tensor) -> Tensor:
    dtype = torch_type(op.get("dtype")) if op.get("dtype") else x.dtype
    ones = torch.ones(x.shape, dtype=dtype, device=x.device)
    offset = op.get("k", 0)
    return torch.triu(torch.tril(ones, offset), offset)


@operator("Reshape", host=(1,))
def _reshape(op: Operation, x: Tensor, shape: HostNumbers) -> Tensor:
    wanted = integers(shape)
    if not op.get("allowzero", 0):
        wanted = [x.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Flatten")
def _flatten(op: Operation, x: Tensor) -> Tensor:
    axis = op.get("axis", 1)
    front = x.shape[: axis if axis >= 0 else x.dim() + axis]
    return x.reshape(int(torch.Size(front).numel()), -1)


@operator("Squeeze", host=(1,))
def _squeeze(op: Operation, x: Tensor, given: HostNumbers | None = None) -> Tensor:
    axes = op.axes(x.dim(), given)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@operator("Unsqueeze", host=(1,))
def _unsqueeze(op: Operation, x: Tensor, given: HostNumbers | None = None) -> Tensor:
    count = len(op.get("axes", ()) if given is None else integers(given))
    for axis in sorted(op.axes(x.dim() + count, given) or []):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def _transpose(op: Operation, x: Tensor) -> Tensor:
    return x.permute(op.get("perm", tuple(reversed(range(x.dim())))))


@operator("Expand", host=(1,))
def _expand(op: Operation, x: Tensor, shape: HostNumbers) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, torch.Size(integers(shape))))


@operator("Tile", host=(1,))
def _tile(op: Operation, x: Tensor, repeats: HostNumbers) -> Tensor:
    return x.repeat(integers(repeats))


@operator("Concat")
def _concat(op: Operation, *inputs: Tensor) -> Tensor:
    return torch.cat(inputs, op.get("axis", 1))


@operator("Split", host=(1,))
def _split(op: Operation, x: Tensor, sizes: HostNumbers | None = None) -> tuple[Tensor, ...]:
    axis = op.get("axis", 0)
    lengths = op.get("split") if sizes is None else integers(sizes)
    if lengths is None:  # equal parts, the last one smaller
        count = op.get("num_outputs", len(op.node.outputs))
        lengths = [len(part) for part in torch.arange(x.shape[axis]).split(-(-x.shape[axis] // count))]
    parts: tuple[Tensor, ...] = torch.split(x, list(lengths), axis)
    return parts


@operator("Slice", host=(1, 2, 3, 4))
def _slice(
    op: Operation,
    x: Tensor,
    starts: HostNumbers | None = None,
    ends: HostNumbers | None = None,
    axes: HostNumbers | None = None,
    steps: HostNumbers | None = None,
) -> Tensor:
    begin = integers(op.get("starts") if starts is None else starts)
    end = integers(op.get("ends") if ends is None else ends)
    along = op.axes(x.dim(), axes) or list(range(len(begin)))
    step = [1] * len(begin) if steps is None else integers(steps)
    for axis, first, last, stride in zip(along, begin, end, step, strict=True):
        indices = range(x.shape[axis])[first:last:stride]  # ONNX clamps as Python does
        if stride > 0:
            x = torch.ops.aten.slice.Tensor(x, axis, indices.start, max(indices.start, indices.stop), stride)
        else:
            x = x.index_select(axis, indices.start - torch.arange(0, -stride * len(indices), -stride, device=x.device))
    return x


_PADDING = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad", host=(1, 2, 3))
def _pad(
    op: Operation,
    x: Tensor,
    pads: HostNumbers | None = None,
    value: HostNumbers | None = None,
    axes: HostNumbers | None = None,
) -> Tensor:
    widths = integers(op.get("pads") if pads is None else pads)
    along = list(range(x.dim())) if axes is None else op.axes(x.dim(), axes) or []
    before, after = widths[: len(along)], widths[len(along) :]
    wanted = dict(zip(along, zip(before, after, strict=True), strict=True))
    mode = op.get("mode", "constant")
    lowest = min((axis for axis, pair in wanted.items() if pair != (0, 0)), default=x.dim())
    flat = [width for axis in reversed(range(lowest, x.dim())) for width in wanted.get(axis, (0, 0))]
    if not flat:
        return x
    if mode == "constant":
        return functional.pad(x, flat, value=number(value, op.get("value", 0.0)))
    if lowest < x.dim() - 3 or x.dim() - lowest not in (x.dim() - 1, x.dim() - 2):
        raise UnsupportedVariant(f"padding of mode {mode!r} along axis {lowest}")
    return functional.pad(x, flat, mode=_PADDING[mode])


@operator("Trilu", host=(1,))
def _trilu(op: Operation, x: Tensor, offset: HostNumbers | None = None) -> Tensor:
    diagonal = int(number(offset, 0))
    return torch.triu(x, diagonal) if op.get("upper", 1) else torch.tril(x, diagonal)


@operator("DepthToSpace")
def _depth_to_space(op: Operation, x: Tensor) -> Tensor:
    size = op.get("blocksize")
    batch, channels, height, width = x.shape
    if op.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, size)
    split = x.reshape(batch, size, size, channels // size**2, height, width)
    return split.permute(0, 3, 4, 1, 5, 2).reshape(batch, channels // size**2, height * size, width * size)


@operator("SpaceToDepth")
def _space_to_depth(op: Operation, x: Tensor) -> Tensor:
    size = op.get("blocksize")
    batch, channels, height, width = x.shape
    if op.get("mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(x, size)
    split = x.reshape(batch, channels, height // size, size, width // size, size)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(batch, channels * size**2, height // size, width // size)


@operator("OneHot", host=(1, 2))
def _one_hot(op: Operation, indices: Tensor, depth: HostNumbers, values: HostNumbers) -> Any:
    classes = int(number(depth, 0))
    hot = functional.one_hot(indices.to(torch.int64) % classes, classes).to(values.dtype)
    off, on = values.tolist()
    axis = op.get("axis", -1)
    return (hot * (on - off) + off).movedim(-1, axis)
