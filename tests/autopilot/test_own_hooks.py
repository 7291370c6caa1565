"""Calls around which the program has saved-tensor hooks of its own, as PyTorch's checkpointing has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pooch
from pooch.autopilot.summary import AutoSummary
from tests.live_before import live_before

WIDTH, ROWS, STEPS = 128, 1024, 6
ACTIVATION_BYTES = 4 * WIDTH * ROWS


def block() -> nn.Module:
    return nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def first_by_the_program(blocks: nn.ModuleList, inputs: Tensor) -> Tensor:
    hidden: Tensor = checkpoint(blocks[0], inputs, use_reentrant=False)  # type: ignore[no-untyped-call]
    for each in blocks[1:]:
        hidden = each(hidden)
    return hidden


def all_by_the_program(blocks: nn.ModuleList, inputs: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for each in blocks:
            inputs = each(inputs)
    return inputs


def trained(
    forward: Callable[[nn.ModuleList, Tensor], Tensor], budget: int | str | None
) -> tuple[list[Tensor], AutoSummary | None]:
    torch.manual_seed(0)
    blocks = nn.ModuleList([block() for _ in range(4)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    auto = None
    if isinstance(budget, int):
        budget += live_before()
    if budget is not None:
        auto = pooch.auto(list(blocks), budget, optimizer, quiet=True)
    losses = []
    for _ in range(STEPS):
        loss = forward(blocks, torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    summary = None
    if auto is not None:
        summary = auto.summary()
        auto.remove()
    return [*losses, *(each.detach() for each in blocks.parameters())], summary


@pytest.mark.parametrize("budget", [10 * ACTIVATION_BYTES, "60%"])
def test_what_comes_after_a_first_call_with_hooks_is_under_the_budget(budget: int | str) -> None:
    plain, _ = trained(first_by_the_program, None)
    numbers, summary = trained(first_by_the_program, budget)
    assert all(map(torch.equal, numbers, plain))
    assert summary is not None
    assert summary.steps_online == STEPS
    assert summary.swapped_bytes + summary.recomputed_ops > 0
    assert summary.budget_bytes is not None
    assert summary.steps_over_budget <= (budget == "60%"), summary


def test_a_share_is_known_and_its_excess_told_where_all_calls_have_hooks() -> None:
    plain, _ = trained(all_by_the_program, None)
    numbers, summary = trained(all_by_the_program, "60%")
    assert all(map(torch.equal, numbers, plain))
    assert summary is not None
    assert summary.steps_in_core == STEPS
    assert summary.budget_bytes is not None
    assert summary.steps_over_budget > 0
    assert "everything fits" not in str(summary)
