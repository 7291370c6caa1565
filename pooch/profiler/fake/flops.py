"""Arithmetic and memory traffic of one operator, from the geometry of its arguments and results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from pooch.torchtools.tensors import find_tensors

aten = torch.ops.aten

_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward, aten.cudnn_convolution}

# These read rows out of a table, not the table: they move what they return, twice.
_GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select, aten.take, aten._unsafe_index}

# These set memory aside and do not touch it.
_UNTOUCHED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}

# Arguments that are read a second time: statistics first, then what is made of them.
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
    """Whether the operator is a convolution, forward or backward."""
    return func.overloadpacket in _CONVOLUTIONS


def operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations of matrix products, convolutions, attention and recurrent layers; 0 for all others,
    which memory bounds. From PyTorch's own formulas where it has one.
    """
    packet = func.overloadpacket
    recurrent = _RECURRENT.get(packet)
    if recurrent is not None:
        return recurrent * _recurrent_operations(args)
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


# Times the operations of one forward pass: the backward pass makes gradients of inputs and of weights.
_RECURRENT: dict[Any, float] = {
    aten.mkldnn_rnn_layer: 1.0,
    aten.mkldnn_rnn_layer_backward: 2.0,
    aten._cudnn_rnn: 1.0,
    aten._cudnn_rnn_backward: 2.0,
}


def _recurrent_operations(args: Any) -> float:
    """Two operations for each weight, step and item: the layer's matrices meet every row of its input."""
    tensors = list(find_tensors(args))
    rows = math.prod(tensors[0].shape[:-1])
    weights = [t for t in tensors[1:5] if t.ndim == 2]
    return 2.0 * rows * sum(weight.numel() for weight in weights)


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Bytes that the operator reads and writes in device memory, each part once unless its algorithm needs it again."""
    packet = func.overloadpacket
    if packet in _UNTOUCHED:
        return 0.0
    written = sum(_extent_bytes(tensor) for tensor in _distinct(result))
    if packet in _GATHERS:
        return 2.0 * written
    again = sum(_extent_bytes(args[i]) for i in _READ_TWICE.get(packet, ()) if isinstance(args[i], torch.Tensor))
    return written + again + sum(_extent_bytes(tensor) for tensor in _distinct((args, kwargs)))


def _distinct(nested: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in find_tensors(nested)}.values())


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements; those that an expanded tensor repeats count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def arithmetic_type(args: Any) -> str:
    """The dtype that the operator computes in: that of its first floating-point argument."""
    for tensor in find_tensors(args):
        if tensor.dtype.is_floating_point:
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"
