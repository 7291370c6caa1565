"""Copies of a model and its optimizer's state that are made in mid-training: what was copied may leave again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.autopilot import test_persistence
from tests.autopilot.test_persistence import adamw, contents, everything, held, memory_of, network, step
from tests.live_before import live_before

pytestmark = test_persistence.pytestmark
Use = Callable[[nn.Module, torch.optim.Optimizer], Any]
ROOM_BYTES = 2**19  # for activations and what single ops need


def copied_together(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return everything(*copy.deepcopy((model, optimizer)))


def copied_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    states = copy.deepcopy(optimizer.state_dict())["state"]
    return contents([state[name] for state in states.values() for name in sorted(state)])


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.5)
    return contents([*average.parameters()])


def saved_and_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for each in (model, optimizer):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        file.seek(0)
        each.load_state_dict(torch.load(file))
    return everything(model, optimizer)


# How many times the size of the parameters is what a use makes of its own.
USES: dict[str, tuple[Use, float]] = {
    "both": (copied_together, 3),
    "state": (copied_state, 2),
    "an average": (averaged, 1),
    "saved and loaded": (saved_and_loaded, 2),
}


def trained(use: Use, budget: Callable[[nn.Module], int] | None) -> tuple[Any, ...]:
    model = network()
    optimizer = adamw(model)
    torch.manual_seed(1)
    if budget is None:
        losses = [step(model, optimizer) for _ in range(2)]
        used = use(model, optimizer)
        return losses, used, step(model, optimizer), everything(model, optimizer)
    with held(model, optimizer, budget(model)) as auto:
        losses = [step(model, optimizer) for _ in range(2)]
        moved = memory_of(auto).values.moved.in_bytes
        before = moved.total()
        used = use(model, optimizer)
        assert moved.total() > before
        return losses, used, step(model, optimizer), everything(model, optimizer)


@pytest.mark.parametrize("name", USES)
def test_what_is_copied_between_steps_leaves_again_as_the_next_is_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, times = USES[name]
    monkeypatch.setattr(test_persistence, "others_bytes", live_before())
    expected = trained(use, None)

    def budget(model: nn.Module) -> int:
        return int((0.5 + times) * sum(each.nbytes for each in model.parameters())) + ROOM_BYTES

    assert trained(use, budget) == expected
