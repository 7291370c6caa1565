"""A net of many layers that processes of tests train on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def deep_net(layers: int, rows: int) -> tuple[nn.Module, Callable[[], Tensor], Callable[[int], list[list[str]]]]:
    """Return the model, what computes its loss, and what makes some steps and returns the bits of each.

    Args:
        layers: How many.
        rows: Of its inputs.
    """
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.Tanh())]
    model, inputs = nn.Sequential(*parts).cuda(), torch.randn(rows, 64, device="cuda")

    def forward() -> Tensor:
        loss: Tensor = model(inputs).square().mean()
        return loss

    def steps(count: int) -> list[list[str]]:
        found = []
        for _ in range(count):
            model.zero_grad()
            loss = forward()
            loss.backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            found.append([loss.item().hex()] + [each.sum().item().hex() for each in gradients])
        return found

    return model, forward, steps
