"""Sequence to sequence with additive attention (Bahdanau et al. 2015), for machine translation.

Every step of the decoder adds its query to the keys of all source positions and takes the tanh of the sum. Autograd
saves each result, T_target * T_source * N * width numbers in all. Nothing is done about it here: that is up to the
plan.
"""

from __future__ import annotations

import torch
from torch import nn

from ...workloads.base import Workload
from ...workloads.models.recurrent import LstmCell, lstm_layers


class AdditiveAttention(nn.Module):
    """Scores v . tanh(keys + query), softmax over the source, weighted sum of the memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, keys: torch.Tensor, memory: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Keys and memory (N, S, width) and a state (N, width) to a context (N, width)."""
        summed = torch.tanh(keys + self.query(state).unsqueeze(1))
        weights = torch.softmax(self.score(summed), dim=1)
        return torch.matmul(weights.transpose(1, 2), memory).squeeze(1)


class Decoder(nn.Module):
    """One LSTM layer that reads each word with the last context, and attends to the source at every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys = nn.Linear(width, width, bias=False)
        self.attention = AdditiveAttention(width)
        self.cell = LstmCell(2 * width, width)
        self.combine = nn.Linear(2 * width, width)

    def forward(
        self, words: torch.Tensor, memory: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> torch.Tensor:
        """Words (N, T, width), encoded source (N, S, width) and first state (N, width) to outputs (N, T, width)."""
        keys = self.keys(memory)
        context = torch.zeros_like(hidden)
        outputs: list[torch.Tensor] = []
        for word in words.unbind(1):
            hidden, cell = self.cell(torch.cat([word, context], dim=1), hidden, cell)
            context = self.attention(keys, memory, hidden)
            outputs.append(torch.tanh(self.combine(torch.cat([hidden, context], dim=1))))
        return torch.stack(outputs, dim=1)


class Translator(nn.Module):
    """LSTM encoder, decoder with attention, linear layer onto the target's vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int, unrolled: bool) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = nn.Embedding(vocabulary, width)
        self.unrolled = unrolled
        self.encoder = lstm_layers(width, width, layers, 0.0, unrolled)
        self.decoder = Decoder(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Source tokens (N, S), target tokens (N, T) to logits (N, T, vocabulary)."""
        memory, last = self.encoder(self.source_embedding(source))
        hidden, cell = last[-1] if self.unrolled else (last[0][-1], last[1][-1])
        logits: torch.Tensor = self.head(self.decoder(self.target_embedding(target), memory, hidden, cell))
        return logits


def build(
    batch_size: int = 32,
    device: str = "cpu",
    sequence_length: int = 30,
    vocabulary: int = 2000,
    width: int = 512,
    layers: int = 2,
    unrolled: bool = True,
    seed: int = 0,
) -> Workload:
    """A translator with random weights on random sentences, source and target equally long; cross entropy; Adam.

    `unrolled` applies to the encoder; a decoder with attention is always unrolled.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = Translator(vocabulary, width, layers, unrolled)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(vocabulary, (batch_size, sequence_length), generator=generator).to(device)
    text = torch.randint(vocabulary, (batch_size, sequence_length + 1), generator=generator).to(device)
    target, expected = text[:, :-1].contiguous(), text[:, 1:].reshape(-1)

    def forward() -> torch.Tensor:
        return nn.functional.cross_entropy(model(source, target).flatten(0, 1), expected)

    return Workload(model, forward, optimizer, "nmt", batch_size)
