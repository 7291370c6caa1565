"""Where fake kernels say something else than real ones do about what an operator returns."""

from __future__ import annotations

from typing import Any

import torch

from pooch.torchtools.tensors import map_tensors


def distinct_results(result: Any) -> Any:
    """No operator returns one new tensor twice; some fake kernels do (both biases of a recurrent layer)."""
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return torch.empty_like(tensor)
        seen.add(id(tensor))
        return tensor

    return map_tensors(distinct, result) if isinstance(result, (list, tuple)) else result


def sized_workspaces(func: Any, args: Any, result: Any) -> Any:
    """What a recurrent layer keeps for its backward pass: fake kernels give it no size."""
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
    """Workspace of one oneDNN LSTM layer in one direction, in bytes: its parts in pages, rows padded as it pads them.

    Found by comparing sizes that the library asked for, and exact for all that were tried (the tests try some): gates,
    three arrays of layer states, two of iteration states, and one of hidden size.
    """
    steps, batch, width = inputs.shape  # PyTorch hands it over so, whatever the layer's batch_first
    widest = _padded(max(width, hidden))
    states = 2 * (steps + 1) * batch
    parts = (
        steps * batch * _padded(4 * hidden),
        *(states * widest,) * 3,
        *(states * hidden,) * 2,
        steps * batch * _padded(hidden),
    )
    return sum(-(-part * _FLOAT_BYTES // _PAGE_BYTES) * _PAGE_BYTES for part in parts)


def _padded(columns: int) -> int:
    """Elements from row to row: whole cache lines, and no multiple of 256, so that rows do not share cache sets."""
    whole = -(-columns // 16) * 16
    return whole + 16 if whole % 256 == 0 else whole


def _cudnn_reserve_bytes(args: Any) -> int:
    """A guess: four gates, the cell and the output of each step, layer and direction; the library tells only at run
    time.
    """
    inputs, hidden, layers, directions = args[0], args[7], args[9], 2 if args[13] else 1
    rows = inputs.numel() // inputs.shape[-1]
    return int(6 * rows * hidden * layers * directions * inputs.element_size())
