"""Char-RNN (Karpathy 2015): LSTM layers over single characters, one-hot in, next character out."""

from __future__ import annotations

import torch
from torch import nn

from ...workloads.base import Workload
from ...workloads.models.lstm import next_token_training
from ...workloads.models.recurrent import lstm_layers


class CharRnn(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, characters: int, width: int, layers: int, dropout: float, unrolled: bool) -> None:
        super().__init__()
        self.characters = characters
        self.lstm = lstm_layers(characters, width, layers, dropout, unrolled)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Characters (N, T) to logits (N, T, characters)."""
        one_hot = nn.functional.one_hot(text, self.characters).to(self.head.weight.dtype)
        hidden, _ = self.lstm(one_hot)
        logits: torch.Tensor = self.head(hidden)
        return logits


def build(
    batch_size: int = 50,
    device: str = "cpu",
    sequence_length: int = 100,
    characters: int = 96,
    width: int = 512,
    layers: int = 2,
    dropout: float = 0.0,
    unrolled: bool = True,
    seed: int = 0,
) -> Workload:
    """A char-RNN with random weights on random text; cross entropy; Adam."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = CharRnn(characters, width, layers, dropout, unrolled)
    return next_token_training("char_rnn", model, batch_size, sequence_length, characters, device, seed)
