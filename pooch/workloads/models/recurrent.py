"""Recurrent layers op by op, so that a plan can decide on the activations of each time step.

`nn.LSTM` is one op per layer (or one for all layers on a GPU), and a plan cannot decide on anything inside it.
`UnrolledLstm` has weights of the same shapes and computes the same function with one op per arithmetic step.
"""

from __future__ import annotations

import torch
from torch import nn


class LstmCell(nn.Module):
    """One step of an LSTM: all gates from one linear layer each for input and state."""

    def __init__(self, input_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(input_size, 4 * width)
        self.from_state = nn.Linear(width, 4 * width)

    def forward(
        self, inputs: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (N, input_size), hidden and cell state (N, width) to the next hidden and cell state."""
        gates = self.from_input(inputs) + self.from_state(hidden)
        opened, candidate = torch.sigmoid(gates[:, : 3 * self.width]), torch.tanh(gates[:, 3 * self.width :])
        write, forget, read = opened.chunk(3, dim=1)
        cell = forget * cell + write * candidate
        return read * torch.tanh(cell), cell


class UnrolledLstm(nn.Module):
    """Layers of `LstmCell`, unrolled over time; dropout between layers as in `nn.LSTM`."""

    def __init__(self, input_size: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList([LstmCell(width if layer else input_size, width) for layer in range(layers)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Inputs (N, T, input_size) to the last layer's hidden states (N, T, width), and each layer's last state."""
        sequence = list(inputs.unbind(1))
        last: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(self.cells):
            hidden = cell = inputs.new_zeros(inputs.shape[0], self.width)
            for step, item in enumerate(sequence):
                hidden, cell = layer(item if number == 0 else self.dropout(item), hidden, cell)
                sequence[step] = hidden
            last.append((hidden, cell))
        return torch.stack(sequence, dim=1), last


def lstm_layers(input_size: int, width: int, layers: int, dropout: float, unrolled: bool) -> nn.Module:
    """LSTM layers from (N, T, input_size) to (N, T, width): unrolled, or one op for all of them."""
    if unrolled:
        return UnrolledLstm(input_size, width, layers, dropout)
    return nn.LSTM(input_size, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
