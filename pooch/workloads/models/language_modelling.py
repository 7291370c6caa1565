"""Training of language models from the transformers package on random tokens."""

from __future__ import annotations

import torch

from ..base import Workload


def language_modelling(
    model: torch.nn.Module, name: str, batch_size: int, sequence_length: int, vocabulary: int, seed: int
) -> Workload:
    """Train on random tokens (batch_size, sequence_length), with the model's own loss of the next token; AdamW."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (batch_size, sequence_length), generator=generator).to(device)

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return Workload(model, forward, optimizer, name, batch_size)
