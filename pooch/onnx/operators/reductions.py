"""Operators that reduce along axes, and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operation import HostNumbers, Operation
from ..registry import UnsupportedVariant, operator

Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: torch.sum(torch.abs(x), axes, keep, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keep, dtype=x.dtype),
}


def _reducing(reduce: Reduction) -> Callable[..., Any]:
    def run(op: Operation, x: Tensor, given: HostNumbers | None = None) -> Tensor:
        axes = op.axes(x.dim(), given)
        if not axes:  # none given, or an empty list: all, unless the node defines this as none
            if op.get("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.dim()))
        return reduce(x, axes, bool(op.get("keepdims", 1)))

    return run


for _name, _reduction in _REDUCTIONS.items():
    operator(_name, host=(1,))(_reducing(_reduction))


@operator("ArgMax", "ArgMin")
def _position(op: Operation, x: Tensor) -> Tensor:
    if op.get("select_last_index", 0):
        raise UnsupportedVariant("select_last_index")
    function = torch.argmax if op.node.kind == "ArgMax" else torch.argmin
    return function(x, op.get("axis", 0), bool(op.get("keepdims", 1)))


@operator("Softmax", "LogSoftmax")
def _softmax(op: Operation, x: Tensor) -> Tensor:
    function = torch.softmax if op.node.kind == "Softmax" else torch.log_softmax
    if op.opset >= 13:
        return function(x, op.get("axis", -1))
    axis = op.get("axis", 1) % x.dim()  # before opset 13, softmax was over all axes from this one
    return function(x.flatten(axis), -1).reshape(x.shape) if axis < x.dim() else x
