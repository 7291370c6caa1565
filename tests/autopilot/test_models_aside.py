"""Models that are never called with gradients: averages, references and teachers leave where the budget needs it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pooch
from pooch.torchtools import watch
from tests.autopilot.test_persistence import WIDTH, contents, network
from tests.live_before import live_before

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")
STEPS = 5
Update = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]  # model, the one aside, rows: the loss


def averaged(model: nn.Module, aside: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for mean, now in zip(aside.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.1)
    return model(rows).square().mean()


def taught(model: nn.Module, aside: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found = model(rows)
    with torch.no_grad():
        wanted = aside(rows)
    return (found - wanted).square().mean()


def followed(model: nn.Module, aside: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = aside(rows).amax(1)
    loss = (model(rows)[:, 0] - wanted).square().mean()
    if loss.item() < 10:
        aside.load_state_dict(model.state_dict())
    return loss


USES: dict[str, Update] = {"an average": averaged, "a teacher": taught, "a target": followed}


def trained(use: Update, is_frozen: bool, is_held: bool) -> tuple[list[Any], list[str], Any]:
    before_bytes = live_before()
    model = network()
    aside = copy.deepcopy(model).requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[str] = []
    budget_bytes = before_bytes + int(0.8 * sum(each.nbytes for each in model.parameters())) + 2**18
    around = pooch.auto(model, budget_bytes, optimizer, tell=told.append) if is_held else contextlib.nullcontext()
    torch.manual_seed(1)
    losses = []
    with around as auto:
        for number in range(STEPS):
            loss = use(model, aside, torch.randn(8, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if auto is not None and number > 0:  # what the first step meets is known from then on
                assert auto._driver.evictor.live.peak() <= budget_bytes
        summary = None if auto is None else auto.summary()
    return [losses, contents([*model.parameters(), *aside.parameters()])], told, summary


@pytest.mark.parametrize(("name", "is_frozen"), [("an average", False), ("a teacher", False), ("a target", True)])
def test_models_that_are_not_trained_leave_too(name: str, is_frozen: bool) -> None:
    plain, _, _ = trained(USES[name], is_frozen, False)
    found, told, summary = trained(USES[name], is_frozen, True)
    assert found == plain
    assert summary.peak_bytes <= summary.budget_bytes, told
