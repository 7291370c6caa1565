"""Operators that gather and scatter elements by index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import HostNumbers, Operation, number
from ..registry import UnsupportedVariant, operator


def _not_negative(indices: Tensor, size: int) -> Tensor:
    """Convert negative indices, which ONNX counts from the end."""
    return torch.where(indices < 0, indices + size, indices).to(torch.int64)


@operator("Gather")
def _gather(op: Operation, data: Tensor, indices: Tensor) -> Tensor:
    axis = op.get("axis", 0) % data.dim()
    wrapped = _not_negative(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return functional.embedding(wrapped, data)
    picked = data.index_select(axis, wrapped.reshape(-1))
    return picked.reshape(data.shape[:axis] + indices.shape + data.shape[axis + 1 :])


@operator("GatherElements")
def _gather_elements(op: Operation, data: Tensor, indices: Tensor) -> Tensor:
    axis = op.get("axis", 0)
    return torch.gather(data, axis, _not_negative(indices, data.shape[axis]))


def _index_tuple(indices: Tensor) -> tuple[Tensor, ...]:
    return tuple(indices.to(torch.int64).unbind(-1))


@operator("GatherND")
def _gather_nd(op: Operation, data: Tensor, indices: Tensor) -> Tensor:
    batched = op.get("batch_dims", 0)
    leading = []
    for axis in range(batched):  # each item of the batch indexes its own part of the data
        shape = [1] * (indices.dim() - 1)
        shape[axis] = data.shape[axis]
        leading.append(torch.arange(data.shape[axis], device=data.device).reshape(shape))
    return data[(*leading, *_index_tuple(indices))]


@operator("ScatterND")
def _scatter_nd(op: Operation, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    reduction = op.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise UnsupportedVariant(f"reduction {reduction!r}")
    return data.index_put(_index_tuple(indices), updates, accumulate=reduction == "add")


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements", "Scatter")
def _scatter_elements(op: Operation, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, reduction = op.get("axis", 0), op.get("reduction", "none")
    wrapped = _not_negative(indices, data.shape[axis])
    if reduction == "none":
        return data.scatter(axis, wrapped, updates)
    return data.scatter_reduce(axis, wrapped, updates, _REDUCTIONS[reduction])


@operator("TopK", host=(1,))
def _top_k(op: Operation, x: Tensor, count: HostNumbers | None = None) -> tuple[Tensor, Tensor]:
    wanted = int(number(count, op.get("k", 0)))
    op.get("sorted")  # what is sorted serves either way
    axis, largest = op.get("axis", -1), bool(op.get("largest", 1))
    # Of equal elements ONNX takes the first. `torch.topk` takes any, and saves as many indices as `gather` here.
    ordered = torch.sort(x.detach(), dim=axis, descending=largest, stable=True)
    indices = ordered.indices.narrow(axis, 0, wanted).contiguous()
    return torch.gather(x, axis, indices), indices


def _cumulative(accumulate: Callable[..., Tensor], neutral: float) -> Callable[..., Tensor]:
    def run(op: Operation, x: Tensor, axis: HostNumbers) -> Tensor:
        along = int(number(axis, 0))
        turned = x.flip(along) if op.get("reverse", 0) else x
        if op.get("exclusive", 0):
            before = turned.narrow(along, 0, turned.shape[along] - 1)
            turned = torch.cat([torch.full_like(turned.narrow(along, 0, 1), neutral), before], along)
        total = accumulate(turned, along, dtype=x.dtype)
        return total.flip(along) if op.get("reverse", 0) else total

    return run


operator("CumSum", host=(1,))(_cumulative(torch.cumsum, 0))
operator("CumProd", host=(1,))(_cumulative(torch.cumprod, 1))


@operator("ReverseSequence")
def _reverse_sequence(op: Operation, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = op.get("time_axis", 0), op.get("batch_axis", 1)
    steps = torch.arange(x.shape[time], device=x.device)
    ends = lengths.to(torch.int64)[:, None]
    sources = torch.where(steps < ends, ends - 1 - steps, steps)  # (batch, time)
    shape = [1] * x.dim()
    shape[batch], shape[time] = sources.shape
    sources = (sources if batch < time else sources.t()).reshape(shape)
    return torch.gather(x, time, sources.expand(x.shape))


@operator("NonZero")
def _non_zero(op: Operation, x: Tensor) -> Tensor:
    if x.is_meta:
        raise UnsupportedVariant("a result whose size depends on the data")
    return torch.nonzero(x).t()
