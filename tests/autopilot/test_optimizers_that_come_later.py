"""Optimizers that are made, or whose models are first trained, once others are known step in slices as well."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import pooch
from pooch.executor.persistent import PersistentMemory
from pooch.torchtools import watch
from tests.live_before import live_before

WIDTH, LAYERS = 192, 6
LAYER_BYTES = 4 * WIDTH * WIDTH

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")


def network() -> nn.Sequential:
    return nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def states_that_may_leave(memory: PersistentMemory | None) -> int:
    return 0 if memory is None else sum(value.kind == "state" for value in memory.values)


@pytest.mark.parametrize("is_given", [True, False])
def test_the_state_of_a_second_optimizer_leaves_as_that_of_the_first(is_given: bool) -> None:
    model = network()
    half = len(model) // 2
    first = adamw(model[:half])
    budget = sum(parameter.nbytes for parameter in model.parameters()) + 5 * LAYER_BYTES + live_before()
    with pooch.auto(model, budget, first if is_given else None) as auto:
        for _ in range(2):
            step(model, first)
        assert states_that_may_leave(auto._driver._persistence.memory) == LAYERS  # two of each layer of a half
        second = adamw(model[half:])
        for _ in range(3):
            step(model, second)
        assert states_that_may_leave(auto._driver._persistence.memory) == 2 * LAYERS


def test_the_optimizer_of_a_model_that_joins_later_is_found_before_its_first_step() -> None:
    one, other = network(), network()
    optimizers = adamw(one), adamw(other)
    budget = sum(parameter.nbytes for parameter in one.parameters()) + 5 * LAYER_BYTES + live_before()
    with pooch.auto(one, budget) as auto:
        for _ in range(2):
            step(one, optimizers[0])
        auto.add(other)
        for _ in range(3):
            step(other, optimizers[1])
            step(one, optimizers[0])
        counters = auto._driver.counters
        assert states_that_may_leave(auto._driver._persistence.memory) == 4 * LAYERS
        assert max(counters.peak_bytes, counters.between_peak_bytes) <= budget + 3 * LAYER_BYTES


@pytest.mark.parametrize("how", ["loaded", "replaced"])
def test_state_that_comes_between_two_steps_leaves_in_the_next(how: str) -> None:
    model = network()
    optimizer = adamw(model)
    budget = sum(parameter.nbytes for parameter in model.parameters()) + 5 * LAYER_BYTES + live_before()
    with pooch.auto(model, budget, optimizer) as auto:
        step(model, optimizer)
        saved = optimizer.state_dict()
        saved["state"] = {number: _copied(state) for number, state in enumerate(optimizer.state.values())}
        if how == "loaded":
            optimizer.load_state_dict(saved)
        else:
            optimizer.state = defaultdict(dict, zip(optimizer.state, saved["state"].values(), strict=True))
        del saved
        loss = model(torch.randn(8, WIDTH)).square().mean()
        assert states_that_may_leave(auto._driver._persistence.memory) == 2 * LAYERS
        loss.backward()
