"""Optimizers whose steps stay whole take no more than in plain training, and what the budget has if their ops fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.torchtools import watch
from pooch.torchtools.tensors import find_tensors
from tests.autopilot.test_persistence import WIDTH, contents, memory_of, network
from tests.live_before import live_before

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")
STEPS = 4
PLENTY_BYTES = 2**30


class Sophia(torch.optim.Optimizer):
    """Has its state from another method than its step, which counts steps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.count = 0

    @torch.no_grad()
    def update_hessian(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"], state["hessian"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["hessian"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["momentum"].mul_(0.96).add_(parameter.grad, alpha=0.04 / self.count)
            ratio = state["momentum"].abs().div_(state["hessian"].add(1e-15)).clamp_(None, 1)
            parameter.addcmul_(state["momentum"].sign(), ratio, value=-1e-3)


class Ascending(torch.optim.Optimizer):
    """Goes uphill, has its closure compute gradients there, comes back, and has another optimizer step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.1)
        with torch.enable_grad():
            closure()
        for parameter in parameters:
            parameter.copy_(self.state[parameter]["before"])
        self.inner.step()


def _trained_by_sophia(model: nn.Module, optimizer: Sophia) -> None:
    for number in range(STEPS):
        if number % 2 == 0:
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.update_hessian()
            optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained_with_closures(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        inputs = torch.randn(8, WIDTH)

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


def _lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe")


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "Sophia": (Sophia, _trained_by_sophia),
    "SAM": (Ascending, _trained_with_closures),
    "LBFGS": (_lbfgs, _trained_with_closures),
}


@dataclass
class Found:
    """What a training ends with, and what it took beside what was there before."""

    contents: list[bytes]
    peak_bytes: int


def trained(kind: str, budget_bytes: int) -> Found:
    """Train under a budget, which comes on top of what earlier tests have left."""
    make, train = KINDS[kind]
    before_bytes = live_before()
    model = network()
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    with pooch.auto(model, before_bytes + budget_bytes, optimizer, tell=lambda _: None) as auto:
        train(model, optimizer)
        counters = auto._driver.counters
        if budget_bytes < PLENTY_BYTES:
            assert memory_of(auto).values.moved.out_bytes.total() > 0
        else:
            assert auto._driver._persistence.memory is None
        peak_bytes = max(counters.peak_bytes, counters.between_peak_bytes) - before_bytes
        return Found(contents([*model.parameters(), *find_tensors(list(optimizer.state.values()))]), peak_bytes)


@pytest.mark.parametrize("percent", [70, 45])
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_never_raises_the_peak_of_a_step_that_cannot_be_cut(kind: str, percent: int) -> None:
    plain = trained(kind, PLENTY_BYTES)
    found = trained(kind, plain.peak_bytes * percent // 100)
    assert found.contents == plain.contents
    assert found.peak_bytes <= plain.peak_bytes


@pytest.mark.parametrize("times", [5, 3])
def test_a_parameter_that_is_too_large_to_be_stepped_within_the_budget_is_told_beforehand(times: int) -> None:
    """AdamW takes four times the parameter at once, though neither its slice fits nor plain training."""
    before_bytes = live_before()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH, bias=False), nn.Linear(16 * WIDTH, 1, bias=False))
    (largest, _), told = model.parameters(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    budget_bytes = before_bytes + times * largest.nbytes
    with pooch.auto(model, budget_bytes, optimizer, tell=told.append) as auto:
        loss = model(torch.randn(1, WIDTH)).square().mean()
        is_told = any("to step its largest parameter, of 2.25 MiB" in line for line in told)
        assert is_told is (times < 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
        assert is_told is (auto._driver.counters.between_peak_bytes > budget_bytes)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("share", ["50%", "10%"])
def test_a_parameter_is_compared_with_a_share_once_that_is_known(share: str, is_given: bool) -> None:
    """Until then the budget is what there is of it: all parameters were too large for that, and told to be."""
    torch.manual_seed(0)
    widths = [WIDTH, 16 * WIDTH, WIDTH, 16 * WIDTH, WIDTH]
    model, told = nn.Sequential(*(nn.Linear(*each) for each in pairwise(widths))), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    with pooch.auto(model, share, optimizer if is_given else None, tell=told.append) as auto:
        model(torch.randn(64, WIDTH)).square().mean().backward()
        is_told = any("to step its largest parameter, of 2.25 MiB" in line for line in told)
        optimizer.step()
        assert is_told is (auto._driver.counters.between_peak_bytes > auto._driver.budget.size_bytes)
    assert is_told is (share == "10%")
