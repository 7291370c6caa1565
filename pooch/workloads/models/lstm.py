"""An LSTM language model: embedding, recurrent layers, a linear layer onto the vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from ..base import Workload
from .recurrent import lstm_layers


class LstmLanguageModel(nn.Module):
    """Predicts the next token at every position.

    If unrolled, it runs one op per arithmetic step instead of one per layer.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float, unrolled: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = lstm_layers(width, width, layers, dropout, unrolled)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (N, T) to logits (N, T, vocabulary)."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits


def build(
    batch_size: int = 32,
    device: str = "cpu",
    sequence_length: int = 128,
    vocabulary: int = 2000,
    width: int = 512,
    layers: int = 3,
    dropout: float = 0.2,
    unrolled: bool = False,
    seed: int = 0,
) -> Workload:
    """An LSTM language model with random weights on random tokens; cross entropy; Adam."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = LstmLanguageModel(vocabulary, width, layers, dropout, unrolled)
    return next_token_training("lstm", model, batch_size, sequence_length, vocabulary, device, seed)


def next_token_training(
    name: str, model: nn.Module, batch_size: int, sequence_length: int, vocabulary: int, device: str, seed: int
) -> Workload:
    """Train a model from tokens (N, T) to logits (N, T, vocabulary) on random text; cross entropy; Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocabulary, (batch_size, sequence_length + 1), generator=generator).to(device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].reshape(-1)

    def forward() -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)

    return Workload(model, forward, optimizer, name, batch_size)
