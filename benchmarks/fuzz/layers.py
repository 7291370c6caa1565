"""Ordinary pieces: the layers of which networks are made."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.fuzz.piece import ACTIVATIONS, Piece


class Dense(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {
            "bias": drawing.random() < 0.8,
            "activation": drawing.choice(list(ACTIVATIONS)),
            "batched": drawing.random() < 0.3,
        }

    def build(self, bias: bool, activation: str, batched: bool) -> None:
        self.linear = nn.Linear(self.width, self.width, bias)
        self.activation, self.batched = ACTIVATIONS[activation], batched

    def forward(self, rows: Tensor) -> Tensor:
        inputs = rows.view(8, -1, self.width).transpose(0, 1) if self.batched else rows
        return self.activation(self.linear(inputs)).reshape(rows.shape)


class Perceptron(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"wider": drawing.choice((1, 2)), "activation": drawing.choice(list(ACTIVATIONS))}

    def build(self, wider: int, activation: str) -> None:
        self.up, self.down = nn.Linear(self.width, wider * self.width), nn.Linear(wider * self.width, self.width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.activation(self.up(rows)))


class Norm(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"kind": drawing.choice(("layer", "batch", "group", "rms", "instance", "cumulative", "by hand"))}

    def build(self, kind: str) -> None:
        width = self.width
        makers: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(width),
            "batch": lambda: nn.BatchNorm1d(width),
            "cumulative": lambda: nn.BatchNorm1d(width, momentum=None),
            "group": lambda: nn.GroupNorm(4, width),
            "rms": lambda: nn.RMSNorm(width),
            "instance": lambda: nn.InstanceNorm1d(8, affine=True),
        }
        self.norm = makers[kind]() if kind in makers else None
        self.kind = kind

    def forward(self, rows: Tensor) -> Tensor:
        if self.norm is None:
            return (rows - rows.mean(1, keepdim=True)) * torch.rsqrt(rows.var(1, keepdim=True) + 1e-3)
        if self.kind == "instance":
            return self.norm(rows.view(-1, 8, self.width)).view(rows.shape)
        return self.norm(rows)


class Convolution(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {
            "dimensions": drawing.choice((1, 2)),
            "groups": drawing.choice((1, 2, 4)),
            "bias": drawing.random() < 0.7,
        }

    def build(self, dimensions: int, groups: int, bias: bool) -> None:
        kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
        self.convolution = kind(4, 4, 3, padding=1, groups=groups, bias=bias)
        self.shape = (-1, 4, self.width // 4) if dimensions == 1 else (-1, 4, 4, self.width // 16)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.relu(self.convolution(rows.reshape(self.shape))).reshape(rows.shape)


class Attention(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {
            "heads": drawing.choice((1, 2, 4)),
            "causal": drawing.random() < 0.5,
            "dropout": drawing.choice((0.0, 0.0, 0.2)),
            "module": drawing.random() < 0.3,
        }

    def build(self, heads: int, causal: bool, dropout: float, module: bool) -> None:
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.module = nn.MultiheadAttention(self.width, heads, dropout, batch_first=True) if module else None
        self.inputs = None if module else nn.Linear(self.width, 3 * self.width)

    def forward(self, rows: Tensor) -> Tensor:
        batch = rows.view(-1, 8, self.width)
        if self.module is not None:
            return self.module(batch, batch, batch, need_weights=False)[0].reshape(rows.shape)
        assert self.inputs is not None
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(batch).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=self.causal
        )
        return mixed.transpose(1, 2).reshape(rows.shape)


class Dropout(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {
            "kind": drawing.choice(("dropout", "in place", "alpha", "by hand", "rrelu")),
            "p": drawing.choice((0.1, 0.5)),
        }

    def build(self, kind: str, p: float) -> None:
        self.kind, self.p = kind, p

    def forward(self, rows: Tensor) -> Tensor:
        match self.kind:
            case "dropout":
                return functional.dropout(rows, self.p)
            case "in place":
                return functional.dropout(rows * 1.0, self.p, inplace=True)
            case "alpha":
                return functional.alpha_dropout(rows, self.p)
            case "rrelu":
                return functional.rrelu(rows, training=True)
        return rows * (torch.rand_like(rows) > self.p) / (1 - self.p)


class Recurrent(Piece):
    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"kind": drawing.choice(("gru", "lstm", "rnn", "cell")), "dropout": drawing.choice((0.0, 0.2))}

    def build(self, kind: str, dropout: float) -> None:
        kinds = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
        layers = 2 if dropout else 1
        self.cell = nn.GRUCell(self.width, self.width) if kind == "cell" else None
        self.recurrent = None if kind == "cell" else kinds[kind](self.width, self.width, layers, dropout=dropout)

    def forward(self, rows: Tensor) -> Tensor:
        sequence = rows.view(2, -1, self.width)
        if self.recurrent is not None:
            return self.recurrent(sequence)[0].reshape(rows.shape)
        state, states = torch.zeros_like(sequence[0]), []
        assert self.cell is not None
        for part in sequence:
            state = self.cell(part, state)
            states.append(state)
        return torch.stack(states).reshape(rows.shape)


class Lookup(Piece):
    """Rows of an embedding table, chosen by what the rows are."""

    @staticmethod
    def drawn(drawing: Random) -> dict[str, Any]:
        return {"bag": drawing.random() < 0.4}

    def build(self, bag: bool) -> None:
        self.table = nn.EmbeddingBag(32, self.width) if bag else nn.Embedding(32, self.width)
        self.bag = bag

    def forward(self, rows: Tensor) -> Tensor:
        places = (rows.detach()[:, :3].float().nan_to_num() * 10).clamp(-1e4, 1e4).long().abs() % 32
        return rows + (self.table(places) if self.bag else self.table(places[:, 0]))
