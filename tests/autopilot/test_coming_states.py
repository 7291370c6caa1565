"""State leaves as it is made: by a step that stays whole, by another method, and anew in each step."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pooch
from pooch.autopilot.coming_states import PutStates
from pooch.ground.units import format_bytes
from pooch.torchtools import watch
from pooch.torchtools.tensors import find_tensors
from tests.autopilot.test_persistence import WIDTH, contents, network
from tests.autopilot.test_whole_steps import PLENTY_BYTES
from tests.live_before import live_before

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")
STEPS = 4


class Clipping(torch.optim.Optimizer):
    """Scales all gradients by one norm, so that its step stays whole."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            gradient = parameter.grad.div(norm.clamp(min=1e-3))
            state["mean"].lerp_(gradient, 0.1)
            state["square"].lerp_(gradient.square_(), 0.01)
            parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-6), value=-1e-3)


class Looking(torch.optim.Optimizer):
    """Makes its state in another method, which a program calls now and then."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def look(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["m"], state["h"] = torch.zeros_like(parameter), torch.ones_like(parameter)
            state["h"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["m"].lerp_(parameter.grad, 0.04)
            parameter.add_(state["m"].div(state["h"]).clamp_(-1, 1), alpha=-1e-3)


class Putting(Clipping):
    """Puts its state there without asking for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                self.state[parameter] = {"noise": torch.zeros_like(parameter), "mean": torch.zeros_like(parameter)}
            state = self.state[parameter]
            state["noise"].lerp_(torch.randn_like(parameter), 0.1)
            state["mean"].lerp_(parameter.grad, 0.1)
            parameter.add_(state["mean"].add(state["noise"]), alpha=-1e-3)


class Holding(Clipping):
    """Holds moments in a list of its own."""

    moments: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        if self.moments is None:
            self.moments = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, moment in zip(parameters, self.moments, strict=True):
            parameter.sub_(moment.lerp_(parameter.grad, 0.1), alpha=1e-3)


def _trained(model: nn.Module, optimizer: Any) -> None:
    for _ in range(STEPS):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained_looking(model: nn.Module, optimizer: Looking) -> None:
    for number in range(STEPS):
        if number % 2 == 0:
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.look()
            optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained_with_copies(model: nn.Module, optimizer: Any) -> None:
    """As what keeps its state elsewhere between two steps."""
    for _ in range(STEPS):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state.update({name: tensor.clone() for name, tensor in state.items()})


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "whole": (Clipping, _trained),
    "another method": (Looking, _trained_looking),
    "put there": (Putting, _trained),
}


def trained(kind: str, budget_bytes: int) -> tuple[list[bytes], int, int]:
    """What a training ends with, its peak between steps and its peak in them, beside what was there before."""
    make, train = KINDS.get(kind, (Clipping, _trained_with_copies))
    before_bytes = live_before()
    model = network()
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    with pooch.auto(model, before_bytes + budget_bytes, optimizer, tell=lambda _: None) as auto:
        train(model, optimizer)
        summary = auto.summary()
        found = contents([*model.parameters(), *find_tensors(list(optimizer.state.values()))])
    assert optimizer.state.default_factory is dict
    return found, summary.between_peak_bytes - before_bytes, summary.peak_bytes - before_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_state_leaves_as_it_is_made(kind: str) -> None:
    plain, between_bytes, peak_bytes = trained(kind, PLENTY_BYTES)
    budget_bytes = max(between_bytes, peak_bytes) * 45 // 100
    found, between_bytes, peak_bytes = trained(kind, budget_bytes)
    assert found == plain
    assert max(between_bytes, peak_bytes) <= budget_bytes


@pytest.mark.parametrize(("kind", "moments"), [(Putting, 2), (Holding, 1), (Clipping, 0)])
def test_what_cannot_leave_before_a_whole_step_ends_is_told_beforehand(kind: Any, moments: int) -> None:
    before_bytes, told = live_before(), list[str]()
    model = network()
    optimizer = kind(model.parameters())
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    states: list[int] = []

    def tell(text: str) -> None:
        if "at once" in text:
            told.append(text)
            states.append(len(optimizer.state))

    with pooch.auto(model, before_bytes + 2 * parameters_bytes, optimizer, tell=tell):
        _trained(model, optimizer)
    expected = f"; until it ends, about {format_bytes(moments * parameters_bytes)} stay that it makes"
    assert told[0].endswith(expected) is (moments > 0), told
    assert states[0] == 0


def test_state_that_the_program_replaces_leaves_in_the_next_step() -> None:
    plain, between_bytes, _ = trained("copies", PLENTY_BYTES)
    budget_bytes = between_bytes * 50 // 100
    found, _, peak_bytes = trained("copies", budget_bytes)
    assert found == plain
    assert peak_bytes <= budget_bytes


def test_an_optimizer_is_copied_and_saved_as_it_is() -> None:
    before_bytes = live_before()
    model = network()
    optimizer = Clipping(model.parameters())
    budget_bytes = before_bytes + 2 * sum(parameter.nbytes for parameter in model.parameters())
    with pooch.auto(model, budget_bytes, optimizer, tell=lambda _: None):
        _trained(model, optimizer)
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded):
            assert type(other.state) is defaultdict
            assert other.state.default_factory is dict
            assert contents(find_tensors(list(other.state.values()))) == contents(
                find_tensors(list(optimizer.state.values()))
            )
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _trained(model, optimizer)
    assert optimizer.state.default_factory is dict


def test_state_of_a_large_parameter_leaves_as_the_rest_of_it_is_made() -> None:
    """An op needs the parameter and what it makes; both moments beside it would be half as much again."""
    rows, width = 4096, 128

    def run(budget_bytes: int) -> tuple[list[bytes], int]:
        before_bytes = live_before()
        torch.manual_seed(0)
        model = nn.Embedding(rows, width, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        with pooch.auto(model, before_bytes + budget_bytes, optimizer, tell=lambda _: None) as auto:
            for _ in range(2):
                model(torch.randint(0, rows, (64,))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peak_bytes = max(auto.summary().peak_bytes, auto.summary().between_peak_bytes) - before_bytes
            return contents([*model.parameters(), *find_tensors(list(optimizer.state.values()))]), peak_bytes

    plain, peak_bytes = run(PLENTY_BYTES)
    budget_bytes = peak_bytes * 3 // 4
    found, peak_bytes = run(budget_bytes)
    assert found == plain
    assert peak_bytes <= budget_bytes


def test_the_state_of_a_parameter_is_looked_at_again_where_more_of_it_has_come() -> None:
    parameter = nn.Parameter(torch.rand(8))
    optimizer = Putting([parameter])
    adopted = list[int]()
    library = SimpleNamespace(is_in_op=lambda: True, references_to=watch.LIBRARY.get().references_to)
    memory: Any = SimpleNamespace(
        library=library, adopt_state=lambda of, found: adopted.append(sum(len(of.state[each]) for each in found))
    )
    states, state = PutStates(), optimizer.state[parameter]
    for name in ("first", "second"):
        states.adopt([optimizer], memory)
        state[name] = torch.zeros(8)
        assert states.adopt([optimizer], memory)
    assert not states.adopt([optimizer], memory)
    assert adopted == [0, 1, 2]
