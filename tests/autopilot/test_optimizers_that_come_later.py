"""Optimizers that come later, or step what no model holds, step in slices as well, and all of it may leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

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


def test_a_model_that_joins_in_the_middle_of_a_step_may_leave_in_it() -> None:
    one, other = network(), network()
    optimizer = adamw(one)
    budget = sum(parameter.nbytes for parameter in one.parameters()) + 5 * LAYER_BYTES + live_before()
    with pooch.auto(one, budget, optimizer) as auto:
        for _ in range(2):
            step(one, optimizer)
        loss = one(torch.randn(8, WIDTH)).square().mean()
        memory = auto._driver._persistence.memory
        assert memory is not None
        auto.add(other)
        parameters = {parameter.untyped_storage()._cdata for parameter in other.parameters() if parameter.ndim == 2}
        assert parameters <= {value.key for value in memory.values if value.kind == "parameter"}
        (loss + other(torch.randn(8, WIDTH)).square().mean()).backward()


def test_the_first_step_of_an_optimizer_that_is_made_later_is_in_slices() -> None:
    one, other = network(), network()
    first = adamw(one)
    budget = sum(parameter.nbytes for parameter in one.parameters()) + 5 * LAYER_BYTES + live_before()
    with pooch.auto([one, other], budget, first) as auto:
        for _ in range(2):
            step(one, first)
        second = adamw(other)
        step(other, second)
        counters = auto._driver.counters
        assert max(counters.peak_bytes, counters.between_peak_bytes) <= budget
        assert states_that_may_leave(auto._driver._persistence.memory) == 4 * LAYERS


def _bytes_of(tensors: Iterable[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


class Mixed:
    """A model in half precision, and an optimizer that steps copies of its parameters in full precision."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = network().bfloat16()
        self.copies = [parameter.detach().float() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3)
        self.in_full_bytes = sum(copy.nbytes for copy in self.copies)

    def train(self) -> list[bytes]:
        """Return what three steps end with."""
        torch.manual_seed(1)
        for _ in range(3):
            self.model(torch.randn(8, WIDTH).bfloat16()).float().square().mean().backward()
            for copy, parameter in zip(self.copies, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                copy.grad, parameter.grad = parameter.grad.float(), None
            self.optimizer.step()
            with torch.no_grad():
                for copy, parameter in zip(self.copies, self.model.parameters(), strict=True):
                    parameter.copy_(copy)
                    copy.grad = None
        state = [self.optimizer.state[copy][name] for copy in self.copies for name in ("exp_avg", "exp_avg_sq")]
        return _bytes_of([*self.model.parameters(), *self.copies, *state])


@pytest.mark.parametrize("is_given", [True, False])
def test_copies_in_full_precision_that_an_optimizer_steps_leave(is_given: bool) -> None:
    """The first step of an optimizer that was not given shows whose copies they are, so they are there until then."""
    other = Mixed()
    plain = other.train(), other.train()
    del other
    before_bytes = live_before()
    mixed = Mixed()
    budget = before_bytes + 2 * mixed.in_full_bytes  # copies, gradients and both moments take four times as much
    with pooch.auto(mixed.model, budget, mixed.optimizer if is_given else None, tell=lambda _: None) as auto:
        assert mixed.train() == plain[0]
        memory = auto._driver._persistence.memory
        assert memory is not None
        counters = auto._driver.counters
        assert not is_given or max(counters.peak_bytes, counters.between_peak_bytes) <= budget
        auto._driver._between_peak_bytes = 0
        assert mixed.train() == plain[1]
        counters = auto._driver.counters
        assert max(counters.peak_bytes, counters.between_peak_bytes) <= budget
        assert {copy.untyped_storage()._cdata for copy in mixed.copies if copy.ndim == 2} <= {
            value.key for value in memory.values if value.kind == "parameter"
        }
