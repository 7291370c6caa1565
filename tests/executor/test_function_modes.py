"""Function modes of the program, as `torch.set_default_device` is one: they see what they see in plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import pooch
from pooch.executor import apply_plan
from tests.executor.support import all_of, planned_replays, quick_profile, tight_plan
from tests.executor.test_ways_of_training import Doubling

STEPS = 3


class Recording(TorchFunctionMode):
    """Notes the functions that come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") != "__get__":  # Pooch reads flags of parameters before a step
            self.calls.append(function)
        return function(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(rows)).mul(2).add_(1).tanh()
        return self.second(torch.sin(Doubling.apply(functional.dropout(hidden), 2.0))).abs()  # type: ignore[no-untyped-call]


def taught() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.rand(512, 8)


def seen_in(model: nn.Module, rows: Tensor, mode: Recording, run: Any = None) -> list[Tensor]:
    torch.manual_seed(1)
    with mode:
        for _ in range(STEPS):
            model.zero_grad()
            model(rows).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_a_plan_shows_a_function_mode_what_plain_training_does(choice: Any) -> None:
    model, rows = taught()
    plain, planned = Recording(), Recording()
    expected = seen_in(model, rows, plain)
    model, rows = taught()
    profile = quick_profile(lambda: model(rows).sum(), model)
    plan = tight_plan(profile, all_of(profile, choice, "model"), "model")
    with apply_plan(plan, model) as run:
        found = seen_in(model, rows, planned)
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
        assert run.stats.recomputed_ops == planned_replays(plan)
    assert all(map(torch.equal, expected, found))
    assert planned.calls == plain.calls


def test_steps_without_a_plan_show_a_function_mode_what_plain_training_does() -> None:
    model, rows = taught()
    plain, governed = Recording(), Recording()
    expected = seen_in(model, rows, plain)
    model, rows = taught()
    with pooch.auto(model, budget="60%") as auto:
        found = seen_in(model, rows, governed)
        assert auto.summary().swapped_bytes + auto.summary().recomputed_ops > 0
    assert all(map(torch.equal, expected, found))
    assert governed.calls == plain.calls
