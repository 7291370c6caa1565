"""Functions of the program get back what they have saved as the objects that it was, with all that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from tests.executor.support import all_of, quick_profile

WIDTH, ROWS, STEPS = 64, 512, 4


class Marked(Tensor):
    """A subclass that changes nothing."""


class Watching(torch.autograd.Function):
    """Passes gradients on, larger by what its backward pass finds in what it has saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, passed: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, passed, None)
        return rows.as_subclass(Tensor) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, weight, passed, nothing = ctx.saved_tensors
        assert nothing is None
        weight.sums = getattr(weight, "sums", 0.0) + float(gradients[0].double().sum())
        factor = getattr(rows, "factor", 1.0) * (1.25 if isinstance(rows, Marked) else 1.0)
        factor *= (1.125 if isinstance(weight, nn.Parameter) else 1.0) * getattr(passed, "factor", 1.0)
        gradient = gradients[0] * factor
        return gradient * weight, (gradient * rows.as_subclass(Tensor)).sum(0), None


def _plainly(rows: Tensor) -> Tensor:
    rows.factor = 0.75  # type: ignore[attr-defined]
    return rows


def _marked(rows: Tensor) -> Tensor:
    return _plainly(rows.as_subclass(Marked))


class Net(nn.Module):
    weight: Any
    passed: Any

    def __init__(self, mark: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.mark = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)]), mark
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("passed", torch.ones(WIDTH, WIDTH))
        self.passed.factor = 0.5

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = Watching.apply(self.mark(torch.tanh(layer(rows))), self.weight, self.passed)
        return rows.square().mean()


def _trained(mark: Callable[[Tensor], Tensor], way: Any) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model, rows = Net(mark), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []

    def train() -> None:
        for _ in range(STEPS):
            loss = model(rows)
            loss.backward()
            found.extend([loss.detach(), *(each.grad for each in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()

    moved = 0
    if way == "plain":
        train()
    elif way == "auto":
        with pooch.auto(model, "70%", quiet=True) as auto:
            train()
            moved = auto.summary().recomputed_ops + auto.summary().swapped_bytes
    else:
        profile = quick_profile(lambda: model(rows), model)
        model.weight.sums = 0.0
        plan = pooch.plan_from_decisions(profile, all_of(profile, way, "model"))
        with pooch.apply(plan, model) as run:
            train()
            moved = run.stats.recomputed_ops + run.stats.swapped_out_bytes
    return [*found, torch.tensor(model.weight.sums, dtype=torch.float64)], moved


@pytest.mark.parametrize("mark", [_plainly, _marked])
@pytest.mark.parametrize("way", ["auto", "recompute", "swap"])
def test_functions_find_what_they_have_saved(mark: Callable[[Tensor], Tensor], way: str) -> None:
    plain, _ = _trained(mark, "plain")
    found, moved = _trained(mark, way)
    assert moved > 0
    assert [torch.equal(*pair) for pair in zip(found, plain, strict=True)] == [True] * len(plain)
