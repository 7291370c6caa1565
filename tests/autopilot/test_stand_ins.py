"""Calls of a governed model in which something stands in for its parameters, or for their contents."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import pooch
from pooch.torchtools import watch
from tests.live_before import live_before

WIDTH, LAYERS = 192, 8
STEPS = 4

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def budget_for(model: nn.Module) -> int:
    """One that parameters, gradients and state do not fit into."""
    return live_before() + 2 * sum(parameter.nbytes for parameter in model.parameters())


def trained(step: Callable[[nn.Module, Tensor], Tensor], budget: bool) -> tuple[list[Tensor], Any, list[str]]:
    """Train with or without a budget. Returns losses and parameters, the summary, and what was told."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    told: list[str] = []
    found: list[Tensor] = []
    auto = pooch.auto(model, budget_for(model), tell=told.append) if budget else None
    try:
        for _ in range(STEPS):
            loss = step(model, torch.randn(128, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
        summary = None if auto is None else auto.summary()
    finally:
        if auto is not None:
            auto.remove()
    return found + [parameter.detach().clone() for parameter in model.parameters()], summary, told


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def computed_parameters(model: nn.Module, rows: Tensor) -> Tensor:
    fast = {name: each * 1.01 + 0.001 for name, each in model.named_parameters()}
    return functional_call(model, fast, (rows,)).square().mean()


def test_parameters_that_the_step_has_computed_are_none_that_outlive_it() -> None:
    plain, _, _ = trained(computed_parameters, budget=False)
    found, summary, _ = trained(computed_parameters, budget=True)
    assert same(found, plain)
    assert summary.steps == STEPS


def test_a_call_that_is_traced_begins_no_step() -> None:
    model, rows = network(), torch.randn(128, WIDTH)
    with pooch.auto(model, budget_for(model), tell=lambda line: None) as auto:
        graph = make_fx(lambda each: model(each).sum())(rows)
        assert len(graph.graph.nodes) > LAYERS
        assert auto._driver.running is None
        with FakeTensorMode() as fake:
            parameters = {name: fake.from_tensor(each) for name, each in model.named_parameters()}
            assert functional_call(model, parameters, (fake.from_tensor(rows),)).shape == rows.shape
        assert auto._driver.running is None
        model(rows).sum().backward()
        assert auto.summary().steps == 1
