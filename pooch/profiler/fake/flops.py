"""Arithmetic and memory traffic of one operator, from the geometry of its arguments and results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...torchtools.tensors import dtype_name, find_tensors

aten = torch.ops.aten

_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward, aten.cudnn_convolution}

# These read rows of a table and not the whole table, so they read and write as many bytes as they return.
_GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select, aten.take, aten._unsafe_index}

# These allocate memory without accessing it.
_UNTOUCHED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}

# These fill memory; their argument gives only a shape and a type.
_FILLS = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}

# Positions of arguments that are read twice: once for statistics, once for the result.
_READ_TWICE: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm: (0,),
    aten.cudnn_batch_norm: (0,),
    aten._native_batch_norm_legit: (0,),
    aten.native_batch_norm_backward: (0, 1),
    aten.cudnn_batch_norm_backward: (0, 1),
    aten._softmax: (0,),
    aten._log_softmax: (0,),
}


def is_convolution(func: Any) -> bool:
    """Returns whether the operator is a convolution, forward or backward."""
    return func.overloadpacket in _CONVOLUTIONS


def operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the floating-point operations of matrix products, convolutions, attention and recurrent layers, from
    PyTorch's own formulas where it has one. It is 0 for all other operators, which are bound by memory.
    """
    packet = func.overloadpacket
    recurrent = _RECURRENT.get(packet)
    if recurrent is not None:
        return recurrent * _recurrent_operations(args)
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


# Multiples of the forward pass's operations: the backward pass computes gradients of inputs and of weights.
_RECURRENT: dict[Any, float] = {
    aten.mkldnn_rnn_layer: 1.0,
    aten.mkldnn_rnn_layer_backward: 2.0,
    aten._cudnn_rnn: 1.0,
    aten._cudnn_rnn_backward: 2.0,
}


def _recurrent_operations(args: Any) -> float:
    """Returns two operations per weight, step and item: the layer's matrices multiply every row of its input."""
    tensors = find_tensors(args)
    rows = math.prod(tensors[0].shape[:-1])
    weights = [t for t in tensors[1:5] if t.ndim == 2]
    return 2.0 * rows * sum(weight.numel() for weight in weights)


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the bytes that the operator reads and writes in device memory, counting inputs that it reads twice
    twice.
    """
    packet = func.overloadpacket
    if packet in _UNTOUCHED:
        return 0.0
    written = sum(_extent_bytes(tensor) for tensor in _distinct(result))
    if packet in _GATHERS:
        return 2.0 * written
    if packet in _FILLS:
        return float(written)
    again = sum(_extent_bytes(args[i]) for i in _READ_TWICE.get(packet, ()) if isinstance(args[i], torch.Tensor))
    return written + again + sum(_extent_bytes(tensor) for tensor in _distinct((args, kwargs)))


def _distinct(nested: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in find_tensors(nested)}.values())


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements; elements that an expanded tensor repeats count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def arithmetic_type(args: Any) -> str:
    """Returns the name of the dtype that the operator computes in: that of its first floating-point argument."""
    for tensor in find_tensors(args):
        if tensor.dtype.is_floating_point:
            return dtype_name(tensor.dtype)
    return "float32"
