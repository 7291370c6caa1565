"""Recurrent layers: ONNX weights with gates in PyTorch's order, run by PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..operation import HostNumbers, Operation, integers
from ..registry import UnsupportedVariant, operator

_LSTM_GATES = (0, 2, 3, 1)  # ONNX: input, output, forget, cell; PyTorch: input, forget, cell, output
_GRU_GATES = (1, 0, 2)  # ONNX: update, reset, hidden; PyTorch: reset, update, hidden
_ONE_GATE = (0,)


def _reordered(stacked: Tensor, gates: Sequence[int]) -> Tensor:
    if len(gates) == 1:
        return stacked
    parts = stacked.chunk(len(gates), 0)
    return torch.cat([parts[gate] for gate in gates], 0)


def _flat_weights(
    inputs: Tensor, recurrent: Tensor, biases: Tensor | None, gates: Sequence[int], directions: int
) -> list[Tensor]:
    """Return input weights, recurrent weights and any biases, for each direction."""
    flat: list[Tensor] = []
    for direction in range(directions):
        weights = [inputs[direction], recurrent[direction]]
        if biases is not None:
            weights += list(biases[direction].chunk(2, 0))
        flat += [_reordered(each, gates) for each in weights]
    return flat


def _run(
    op: Operation,
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    state: Any,
    gates: Sequence[int],
    kernel: Any,
) -> tuple[Tensor, Any]:
    """Run the kernel on a sequence, reversed for the direction "reverse". Returns output and last states."""
    backwards = op.get("direction", "forward") == "reverse"
    directions = weights[0].shape[0]
    flat = _flat_weights(*weights, gates, directions)
    sequence = x.flip(0) if backwards else x
    output, *last = kernel(sequence, state, flat, weights[2] is not None, 1, 0.0, False, directions == 2, False)
    output = output.flip(0) if backwards else output
    length, batch = output.shape[:2]
    return output.reshape(length, batch, directions, -1).transpose(1, 2), last


def _check(op: Operation, x: Tensor, lengths: HostNumbers | None, activations: Sequence[str]) -> None:
    if op.get("layout", 0):
        raise UnsupportedVariant("layout 1 (batch first)")
    if op.get("clip") is not None or op.get("input_forget", 0):
        raise UnsupportedVariant("clip or input_forget")
    given = op.get("activations")
    directions = 2 if op.get("direction", "forward") == "bidirectional" else 1
    if given is not None and [name.lower() for name in given] != [name.lower() for name in activations] * directions:
        raise UnsupportedVariant(f"activations {', '.join(given)}")
    if lengths is not None and any(length != x.shape[0] for length in integers(lengths)):
        raise UnsupportedVariant("sequences of unequal lengths")


def _state(given: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    if given is not None:
        return given
    directions, _, width = weight.shape
    return torch.zeros(directions, x.shape[1], width, dtype=x.dtype, device=x.device)


@operator("LSTM", host=(4,), ignores=("hidden_size",))
def _lstm(
    op: Operation,
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    lengths: HostNumbers | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(op, x, lengths, ("Sigmoid", "Tanh", "Tanh"))
    if peepholes is not None:
        raise UnsupportedVariant("peepholes")
    state = (_state(hidden, x, recurrent), _state(cell, x, recurrent))
    output, (last, last_cell) = _run(op, x, (weight, recurrent, bias), state, _LSTM_GATES, torch._VF.lstm)
    return output, last, last_cell


@operator("GRU", host=(4,), ignores=("hidden_size",))
def _gru(
    op: Operation,
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    lengths: HostNumbers | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(op, x, lengths, ("Sigmoid", "Tanh"))
    if not op.get("linear_before_reset", 0):
        raise UnsupportedVariant("linear_before_reset=0 (PyTorch computes the other form)")
    state = _state(hidden, x, recurrent)
    output, (last,) = _run(op, x, (weight, recurrent, bias), state, _GRU_GATES, torch._VF.gru)
    return output, last


@operator("RNN", host=(4,), ignores=("hidden_size",))
def _rnn(
    op: Operation,
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    lengths: HostNumbers | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    activation = (op.get("activations") or ["Tanh"])[0].lower()
    kernels = {"tanh": torch._VF.rnn_tanh, "relu": torch._VF.rnn_relu}
    if activation not in kernels:
        raise UnsupportedVariant(f"activation {activation}")
    _check(op, x, lengths, (activation,))
    state = _state(hidden, x, recurrent)
    output, (last,) = _run(op, x, (weight, recurrent, bias), state, _ONE_GATE, kernels[activation])
    return output, last
