"""Corrects what fake kernels return where it differs from real ones."""

from __future__ import annotations

from typing import Any

import torch

from ...ground.units import round_up
from ...torchtools.tensors import map_tensors


def distinct_results(result: Any) -> Any:
    """Replaces repeated tensors: real operators never return one new tensor twice, but some fake kernels do.

    An example are both biases of a recurrent layer.
    """
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return torch.empty_like(tensor)
        seen.add(id(tensor))
        return tensor

    return map_tensors(distinct, result) if isinstance(result, (list, tuple)) else result


def sized_workspaces(func: Any, args: Any, result: Any) -> Any:
    """Gives a size to what a recurrent layer keeps for its backward pass, which has none in fake kernels."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default and args[_TRAINS]:
        *others, workspace = result
        size = _onednn_lstm_bytes(args[0], hidden=args[10])
        return (*others, workspace.new_empty(size))
    if func.overloadpacket is torch.ops.aten._cudnn_rnn and args[12]:
        output, hidden, cell, reserve, weights = result
        return output, hidden, cell, reserve.new_empty(_cudnn_reserve_bytes(args)), weights
    return result


_TRAINS = 15
_PAGE_BYTES = 4096
_FLOAT_BYTES = 4


def _onednn_lstm_bytes(inputs: torch.Tensor, hidden: int) -> int:
    """Returns the bytes of the workspace of one oneDNN LSTM layer in one direction.

    Its parts are rounded up to pages, their rows padded as oneDNN pads them. The formula was found by comparing the
    sizes that the library requested, and is exact for all that were tried; the tests try some. The parts are gates,
    three arrays of layer states, two of iteration states, and one of hidden size.
    """
    steps, batch, width = inputs.shape  # PyTorch passes this layout whatever the layer's batch_first
    widest = _padded(max(width, hidden))
    states = 2 * (steps + 1) * batch
    parts = (
        steps * batch * _padded(4 * hidden),
        *(states * widest,) * 3,
        *(states * hidden,) * 2,
        steps * batch * _padded(hidden),
    )
    return sum(round_up(part * _FLOAT_BYTES, _PAGE_BYTES) for part in parts)


def _padded(columns: int) -> int:
    """Returns the row stride in elements: whole cache lines, no multiple of 256, to spread the rows over cache sets."""
    whole = round_up(columns, 16)
    return whole + 16 if whole % 256 == 0 else whole


def _cudnn_reserve_bytes(args: Any) -> int:
    """Returns a guess, since the library tells the size only at run time: four gates, the cell and the output of each
    step, layer and direction.
    """
    inputs, hidden, layers, directions = args[0], args[7], args[9], 2 if args[13] else 1
    rows = inputs.numel() // inputs.shape[-1]
    return int(6 * rows * hidden * layers * directions * inputs.element_size())
