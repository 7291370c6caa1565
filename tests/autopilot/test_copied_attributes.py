"""Modules made of all attributes of a governed one, as DataParallel makes its replicas and MAML its fast weights.

Among the attributes is what stands in the place of the calls of the governed module.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.autopilot.finding import ModelFinder
from pooch.torchtools.calls import PLACE

pytestmark = pytest.mark.cpu
ROOMY, TIGHT = "1GiB", "400KiB"
ROWS, WIDTH, STEPS = 256, 64, 12


def model_of_layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def with_all_attributes_of(module: nn.Module, weight_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of the same class with the same attributes, but for weights of its own."""
    made: Any = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {name: None if each is None else weight_of(each) for name, each in module._parameters.items()}
    made._modules = {
        name: None if each is None else with_all_attributes_of(each, weight_of)
        for name, each in module._modules.items()
    }
    return made


def trained(governed: Callable[[nn.Module], AbstractContextManager[object]]) -> list[Tensor]:
    """Steps of a model, and of what it becomes by one step that the loss is differentiated through."""
    model = model_of_layers()
    with governed(model):
        return losses_of(model) + [each.detach().clone() for each in model.parameters()]


def losses_of(model: nn.Module) -> list[Tensor]:
    optimizer, found = torch.optim.Adam(model.parameters()), list[Tensor]()
    for _ in range(STEPS):
        inputs = torch.randn(ROWS, WIDTH)
        model(inputs).square().mean().backward()
        taken = {id(each): each - each.grad for each in model.parameters() if each.grad is not None}
        loss = with_all_attributes_of(model, weights_from(taken))(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def weights_from(taken: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda weight: taken[id(weight)]


def by_auto(budget: str) -> Callable[[nn.Module], AbstractContextManager[object]]:
    return lambda model: pooch.auto(model, budget, quiet=True)


def by_finder(budget: str) -> Callable[[nn.Module], AbstractContextManager[object]]:
    def started(_: nn.Module) -> ExitStack:
        stack, finder = ExitStack(), ModelFinder(budget, tell=lambda line: None)
        finder.start()
        stack.callback(finder.stop)
        return stack

    return started


@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
@pytest.mark.parametrize("way", [by_auto, by_finder])
def test_its_calls_run_it_and_not_the_governed_module(
    way: Callable[[str], Callable[[nn.Module], AbstractContextManager[object]]], budget: str
) -> None:
    plain, others = trained(lambda _: nullcontext()), trained(way(budget))
    assert len(plain) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))


def test_it_outlives_the_module() -> None:
    model, inputs = model_of_layers(), torch.randn(ROWS, WIDTH)
    with pooch.auto(model, ROOMY, quiet=True):
        copied = with_all_attributes_of(model, lambda each: each)
        there = copied(inputs)
        late = with_all_attributes_of(model, lambda each: each)
        del model
        gc.collect()
        assert torch.equal(late(inputs), there)


def test_a_module_that_shares_all_attributes_leaves_them_as_they_are() -> None:
    class Doubling(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    model, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    shared = Doubling.__new__(Doubling)
    with pooch.auto(model, ROOMY, quiet=True) as auto:
        shared.__dict__ = model.__dict__
        assert torch.equal(shared(inputs), 2 * model(inputs))
        for _ in range(2):
            model(inputs).sum().backward()
    assert auto.summary().steps == 2


class WithATwin(nn.Module):
    """Calls a module, and what was made of the attributes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.twins = nn.Linear(WIDTH, WIDTH), list[nn.Module]()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.part(inputs)
        for twin in self.twins:
            hidden = twin(hidden)
        return hidden


def test_it_is_run_where_steps_that_fit_are_followed_without_python() -> None:
    model = WithATwin()
    optimizer, zeros = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros_like
    with pooch.auto(model, ROOMY, quiet=True):
        for number in range(24):
            if number == 12:
                model.twins.append(with_all_attributes_of(model.part, zeros))
            output = model(torch.randn(ROWS, WIDTH))
            assert bool(output.any()) == (number < 12)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 11:
                assert not with_all_attributes_of(model, zeros)(torch.randn(ROWS, WIDTH)).any()


class SaysItself(nn.Linear):
    """Says itself what is saved of it: all attributes, as modules of PyTorch's own that are recurrent do."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def planned(model: nn.Module) -> AbstractContextManager[object]:
    inputs = torch.randn(4, WIDTH)
    profile = pooch.profile(lambda: first_of(model(inputs)).square().mean(), model)
    return pooch.apply(pooch.plan(profile, "100%"), model)


def first_of(made: Any) -> Tensor:
    tensor: Tensor = made[0] if isinstance(made, tuple) else made
    return tensor


@pytest.mark.parametrize("way", [lambda model: pooch.auto(model, ROOMY), planned], ids=["auto", "plan"])
@pytest.mark.parametrize("kind", [nn.LSTM, SaysItself])
def test_what_is_saved_of_a_module_is_the_same_as_without_a_budget(
    kind: type[nn.Module], way: Callable[[nn.Module], AbstractContextManager[object]]
) -> None:
    model = kind(WIDTH, WIDTH)
    before = pickle.dumps(model)
    with way(model):
        first_of(model(torch.randn(4, WIDTH))).square().mean().backward()
        model.zero_grad()
        assert PLACE in vars(model)
        assert pickle.dumps(model) == before
        assert PLACE in vars(model)
    assert "__reduce_ex__" not in vars(nn.Module)
