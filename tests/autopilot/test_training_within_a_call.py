"""A model that runs several backward passes within one call of it, each over what it has called since the one before.

So does memory replay backpropagation: the call runs all segments of a text without gradients, and then each of them
once more, with the backward pass of it.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.torchtools.memory_trace import live_bytes

pytestmark = pytest.mark.cpu
ROWS, WIDTH, DEPTH, SEGMENTS, STEPS = 512, 64, 8, 3, 6
ACTIVATION_BYTES = 4 * ROWS * WIDTH
BUDGET_BYTES = 8 * ACTIVATION_BYTES + 4 * 4 * DEPTH * (WIDTH * WIDTH + WIDTH)  # activations, weights, Adam's state
CPU = torch.device("cpu")


class Replaying(nn.Module):
    """Calls its layers for one segment after the other, and runs a backward pass for each."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        self.layers = nn.Sequential(*layers)

    def forward(self, segments: Tensor) -> Tensor:
        losses = []
        for segment in segments:
            loss = self.layers(segment).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)


def trained(budget_bytes: int | None) -> tuple[list[Tensor], pooch.AutoSummary | None]:
    torch.manual_seed(4)
    model = Replaying()
    optimizer = torch.optim.Adam(model.parameters())
    around = nullcontext() if budget_bytes is None else pooch.auto(model, budget_bytes, optimizer, quiet=True)
    found = []
    with around as auto:
        for _ in range(STEPS):
            found.append(model(torch.randn(SEGMENTS, ROWS, WIDTH)))
            optimizer.step()
            optimizer.zero_grad()
        summary = None if auto is None else auto.summary()
    return [*found, *(each.detach().clone() for each in model.parameters())], summary


def test_each_of_its_backward_passes_ends_a_step_that_holds_the_budget() -> None:
    before_bytes = live_bytes(CPU)
    plain, _ = trained(None)
    others, summary = trained(before_bytes + BUDGET_BYTES + sum(each.nbytes for each in plain))
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))
    assert summary is not None
    assert summary.steps == SEGMENTS * STEPS
    assert summary.steps_over_budget == 0
    assert summary.between_peak_bytes <= summary.budget_bytes


def test_steps_that_fit_are_counted_too() -> None:
    plain, _ = trained(None)
    others, summary = trained(2**30)
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))
    assert summary is not None
    assert summary.steps == SEGMENTS * STEPS
