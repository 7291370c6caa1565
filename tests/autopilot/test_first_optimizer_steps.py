"""The first step of an optimizer makes its state: the budget is held in it, whatever kind of optimizer it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.torchtools import watch
from pooch.torchtools.optimizer_slices import needs_of, plain_step
from pooch.torchtools.tensors import find_tensors
from tests.autopilot.test_persistence import LAYER_BYTES, LAYERS, WIDTH, contents, network
from tests.live_before import live_before

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")
PLENTY_BYTES = 2**30


class Lion(torch.optim.Optimizer):
    """Makes its state in its step, of one number for each of a parameter."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].mul(0.9).add_(parameter.grad, alpha=0.1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(parameter.grad, 0.01)
        return loss


class OnLists(torch.optim.Optimizer):
    """Steps all its parameters together, with temporary tensors for all of them at once."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"square": torch.zeros_like(parameter), "mean": torch.zeros_like(parameter)}
        gradients = [parameter.grad for parameter in parameters]
        squares, means = ([self.state[each][name] for each in parameters] for name in ("square", "mean"))
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, 1e-6)
        torch._foreach_addcdiv_(parameters, means, roots, -1e-3)


def of_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "Lion": lambda model: Lion(model.parameters()),
    "on lists": lambda model: OnLists(model.parameters()),
    "Muon": of_matrices,
}


def trained(make: Callable[[nn.Module], Any], budget_bytes: int) -> tuple[list[bytes], int, bool]:
    """What two steps end with, their peak beside what was there before, and whether anything may leave."""
    before_bytes = live_before()
    model = network()
    optimizer = make(model)
    torch.manual_seed(1)
    with pooch.auto(model, before_bytes + budget_bytes, optimizer, tell=lambda _: None) as auto:
        for _ in range(2):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        summary = auto.summary()
        peak_bytes = max(summary.peak_bytes, summary.between_peak_bytes) - before_bytes
        may_leave = auto._driver._persistence.memory is not None
        return contents([*model.parameters(), *find_tensors(list(optimizer.state.values()))]), peak_bytes, may_leave


@pytest.mark.parametrize("percent", [90, 75])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_first_step_holds_the_budget_with_the_state_that_it_makes(kind: str, percent: int) -> None:
    plain, plain_bytes, _ = trained(MAKERS[kind], PLENTY_BYTES)
    budget_bytes = plain_bytes * percent // 100
    found, peak_bytes, _ = trained(MAKERS[kind], budget_bytes)
    assert found == plain
    assert peak_bytes <= budget_bytes


@pytest.mark.parametrize("kind", MAKERS)
def test_everything_stays_where_a_first_step_fits(kind: str) -> None:
    _, plain_bytes, _ = trained(MAKERS[kind], PLENTY_BYTES)
    _, _, may_leave = trained(MAKERS[kind], plain_bytes * 4 // 3)
    assert not may_leave


def test_parameters_that_come_later_have_state_to_come_as_well() -> None:
    before_bytes = live_before()
    model = network()
    first, *others = (list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear))
    optimizer = Lion(first)
    budget_bytes = before_bytes + LAYERS * LAYER_BYTES * 5 // 2
    with pooch.auto(model, budget_bytes, optimizer, tell=lambda _: None) as auto:
        for number in range(4):
            if number == 2:
                optimizer.add_param_group({"params": [each for layer in others for each in layer]})
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        summary = auto.summary()
        assert max(summary.peak_bytes, summary.between_peak_bytes) <= budget_bytes


def test_a_step_that_computes_its_gradients_is_looked_at_before_it_does() -> None:
    before_bytes = live_before()
    model = network()
    optimizer = Lion(model.parameters())
    budget_bytes = before_bytes + LAYERS * LAYER_BYTES * 11 // 4
    with pooch.auto(model, budget_bytes, optimizer, tell=lambda _: None) as auto:
        for _ in range(2):
            inputs = torch.randn(8, WIDTH)

            def closure(inputs: Tensor = inputs) -> Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        summary = auto.summary()
        assert max(summary.peak_bytes, summary.between_peak_bytes) <= budget_bytes


def test_what_a_step_takes_is_found_without_it() -> None:
    model = network()
    of_lists, one_by_one = OnLists(model.parameters()), Lion(model.parameters())
    state = torch.get_rng_state()
    together, apart = (needs_of(each, plain_step(each)) for each in (of_lists, one_by_one))
    assert together is not None
    assert apart is not None
    assert together.state == {(0, 2): (2.0, 0.0), (0, 1): (2.0, 0.0)}
    assert apart.state == {(0, 2): (1.0, 0.0), (0, 1): (1.0, 0.0)}
    assert (together.beside, apart.beside) == (1.0, 0.0)
    assert not of_lists.state
    assert not one_by_one.state
    assert torch.equal(torch.get_rng_state(), state)


class Mixing(torch.optim.Optimizer):
    """Has a matrix for each side of a parameter, as Shampoo has."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["sides"] = [torch.eye(side) for side in parameter.shape]


def test_state_that_grows_with_a_side_is_thought_to() -> None:
    parameters = [nn.Parameter(torch.zeros(300, 100)), nn.Parameter(torch.zeros(500))]
    optimizer = Mixing(parameters)
    needs = needs_of(optimizer, plain_step(optimizer))
    assert needs is not None
    matrix, vector = (needs.state_bytes(each, 0, 2) for each in parameters)
    assert matrix == pytest.approx(4 * (300**2 + 100**2), rel=0.1)
    assert vector == pytest.approx(4 * 500**2, rel=0.1)


def test_what_cannot_be_copied_tells_nothing() -> None:
    optimizer = torch.optim.LBFGS(network().parameters())
    assert needs_of(optimizer, plain_step(optimizer)) is None


def test_what_autograd_held_views_of_leaves_in_the_first_step_of_an_optimizer() -> None:
    """A share is known only once the backward pass is over; parameters cannot leave within that."""

    def run(is_held: bool) -> list[bytes]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        around = pooch.auto(model, "35%", optimizer, tell=lambda _: None) if is_held else contextlib.nullcontext()
        torch.manual_seed(1)
        with around as auto:
            for _ in range(2):
                model(torch.randn(8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if auto is not None:
                    assert auto._driver._persistence.memory.values.moved.out_bytes["parameter"] > 0
        return contents([*model.parameters()])

    assert run(True) == run(False)
