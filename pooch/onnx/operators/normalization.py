"""Normalization layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..operation import Operation
from ..registry import UnsupportedVariant, operator

_EPSILON = 1e-5


# PyTorch's newer exporter omits the attribute training_mode and names the original operator.
_TRAINED_FROM = ("_native_batch_norm_legit_functional", "batch_norm_with_update")


def _was_training(op: Operation) -> bool:
    """Whether the file uses batch statistics: an attribute since opset 14, additional outputs before."""
    told = bool(op.get("training_mode", 0))
    if any(name in op.node.origin for name in _TRAINED_FROM):
        return True
    if op.opset >= 14:
        return told
    return sum(1 for name in op.node.outputs if name) > 1


@operator("BatchNormalization")
def _batch_norm(op: Operation, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    if any(op.reads(output) for output in range(1, 5)):
        raise UnsupportedVariant("running statistics that are read by other nodes")
    if not op.get("spatial", 1):
        raise UnsupportedVariant("spatial=0")
    # ONNX's momentum is the share of the old statistics, PyTorch's that of the new ones.
    momentum = 1.0 - op.get("momentum", 0.9)
    trains, epsilon = op.trains(_was_training(op)), op.get("epsilon", _EPSILON)
    return functional.batch_norm(x, mean, variance, scale, bias, trains, momentum, epsilon)


@operator("InstanceNormalization")
def _instance_norm(op: Operation, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=op.get("epsilon", _EPSILON))


@operator("LayerNormalization", ignores=("stash_type",))  # the type of the second and third output
def _layer_norm(op: Operation, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    shape = list(x.shape[op.get("axis", -1) % x.dim() :])
    epsilon = op.get("epsilon", _EPSILON)
    if op.reads(1) or op.reads(2):
        shift = None if bias is None else bias.expand(shape)
        return torch.native_layer_norm(x, shape, scale.expand(shape), shift, epsilon)
    if list(scale.shape) == shape and (bias is None or list(bias.shape) == shape):
        return functional.layer_norm(x, shape, scale, bias, epsilon)
    normal = functional.layer_norm(x, shape, None, None, epsilon) * scale
    return normal if bias is None else normal + bias


@operator("RMSNormalization", ignores=("stash_type",))
def _rms_norm(op: Operation, x: Tensor, scale: Tensor) -> Tensor:
    shape = list(x.shape[op.get("axis", -1) % x.dim() :])
    epsilon = op.get("epsilon", _EPSILON)
    if list(scale.shape) == shape:
        return functional.rms_norm(x, shape, scale, epsilon)
    return functional.rms_norm(x, shape, None, epsilon) * scale


@operator("GroupNormalization", ignores=("stash_type",))
def _group_norm(op: Operation, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    # Before opset 21 there was a scale for each group; that form is deprecated, and the checker of onnx refuses it.
    return functional.group_norm(x, op.get("num_groups"), scale, bias, op.get("epsilon", _EPSILON))


@operator("LRN")
def _local_response_norm(op: Operation, x: Tensor) -> Tensor:
    size = op.get("size")
    if size % 2 == 0:
        raise UnsupportedVariant("a window of even size")
    return functional.local_response_norm(x, size, op.get("alpha", 1e-4), op.get("beta", 0.75), op.get("bias", 1.0))


@operator("LpNormalization")
def _lp_norm(op: Operation, x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, op.get("p", 2), op.get("axis", -1), keepdim=True)
    return x / torch.where(length == 0, torch.ones_like(length), length)  # of zeros, zeros


@operator("MeanVarianceNormalization")
def _mean_variance_norm(op: Operation, x: Tensor) -> Tensor:
    axes = list(op.get("axes", [0, 2, 3]))
    centred = x - x.mean(axes, keepdim=True)
    return centred / (torch.sqrt((centred * centred).mean(axes, keepdim=True)) + 1e-9)
