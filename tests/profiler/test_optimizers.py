"""Optimizers: what their state will take is foreseen to the byte, whatever wraps them, and they stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import pooch
from pooch.errors import ProfileError, UsageError
from pooch.profiler.persistent import foreseen_state, state_bytes

Making = Callable[[list[torch.nn.Parameter]], Optimizer]
MAKERS: dict[str, Making] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD, momentum, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam, amsgrad, fused": lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, fused, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "RMSprop, foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), convolution, torch.nn.Linear(3, 3))
    model[3].requires_grad_(False)
    return model


def take_a_step(optimizer: Optimizer) -> None:
    for parameter in trained_by(optimizer):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def foreseen_state_bytes(optimizer: Any, model: torch.nn.Module) -> tuple[int, list[str]]:
    """The bytes of state to come, and the notes."""
    state = foreseen_state(optimizer, model)
    return state.to_come_bytes, list(state.notes)


def trained_by(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_bytes_foreseen_are_those_that_one_real_step_creates(kind: str) -> None:
    model = small_model()
    optimizer = MAKERS[kind](list(model.parameters()))
    had_bytes = state_bytes(optimizer)
    foreseen, notes = foreseen_state_bytes(optimizer, model)
    assert state_bytes(optimizer) == had_bytes
    take_a_step(optimizer)
    assert state_bytes(optimizer) - had_bytes == foreseen
    assert notes == []


def test_a_capturable_optimizer_is_foreseen_where_its_arithmetic_cannot_run() -> None:
    model = small_model()
    capturable = torch.optim.AdamW(model.parameters(), capturable=True)  # steps on a GPU alone
    with pytest.raises(AssertionError, match="capturable"):
        take_a_step(capturable)
    capturable.state.clear()
    assert foreseen_state_bytes(capturable, model) == foreseen_state_bytes(torch.optim.AdamW(model.parameters()), model)
    assert foreseen_state_bytes(capturable, model)[0] > 0


def test_after_its_first_step_nothing_is_to_come() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    take_a_step(optimizer)
    assert foreseen_state_bytes(optimizer, model) == (0, [])


def test_parameters_that_join_later_have_their_state_foreseen_alone() -> None:
    model, more = small_model(), torch.nn.Linear(9, 9)
    optimizer = torch.optim.AdamW(model.parameters())
    take_a_step(optimizer)
    optimizer.add_param_group({"params": list(more.parameters())})
    had_bytes = state_bytes(optimizer)
    foreseen, _ = foreseen_state_bytes(optimizer, model)
    assert len(optimizer.state) == 6  # asking for state did not create any
    take_a_step(optimizer)
    assert state_bytes(optimizer) - had_bytes == foreseen == 2 * 90 * 4 + 2 * 4


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_counted_with_its_full_history_and_says_so(search: str | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=5, line_search_fn=search)
    foreseen, notes = foreseen_state_bytes(optimizer, model)
    assert "full history" in notes[0]
    data, target, most = torch.randn(30, 7), torch.randn(30, 5), 0

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(data) - target).square().mean()
        loss.backward()
        return float(loss.detach())

    for _ in range(8):
        optimizer.step(closure)
        most = max(most, state_bytes(optimizer))
    assert foreseen - 8 <= most <= foreseen  # two of the numbers are not always tensors


class Careful(Optimizer):
    """One whose step needs a closure, as SAM's does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def test_what_cannot_be_foreseen_is_assumed_and_said() -> None:
    model = small_model()
    foreseen, notes = foreseen_state_bytes(Careful(model.parameters()), model)
    assert foreseen == 2 * sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert "could not be predicted (TypeError)" in notes[0]


class Accelerated(Optimizer):
    """As Accelerate's: a torch optimizer whose state and groups are properties that write through."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state, lambda self, given: setattr(self.optimizer, "state", given))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, given: setattr(self.optimizer, "param_groups", given)
    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Redirected:
    """As Lightning's: takes the class of what it wraps, but none of its attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Redirected" + type(optimizer).__name__, (Redirected, type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None, **options: Any) -> Any:
        return self._optimizer.step(closure, **options)


def accelerated(optimizer: Optimizer) -> Any:
    """Accelerate's own."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def of_lightning(optimizer: Optimizer) -> Any:
    """Lightning's own; it steps through a strategy."""
    core = pytest.importorskip("lightning.pytorch.core.optimizer")
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    wrapper = core.LightningOptimizer(optimizer)
    wrapper._strategy = strategies.SingleDeviceStrategy(device="cpu")
    wrapper._strategy.optimizer_step = lambda inner, closure, **options: inner.step(closure)
    return wrapper


def of_fabric(optimizer: Optimizer) -> Any:
    """Lightning Fabric's own."""
    fabric = pytest.importorskip("lightning.fabric")
    _, wrapper = fabric.Fabric(accelerator="cpu").setup(torch.nn.Linear(1, 1), optimizer)
    return wrapper


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {
    "accelerated": Accelerated,
    "redirected": Redirected,
    "both": lambda optimizer: Redirected(Accelerated(optimizer)),
    "accelerated twice": lambda optimizer: Accelerated(Accelerated(optimizer)),
    "accelerate": accelerated,
    "lightning": of_lightning,
    "fabric": of_fabric,
}


@pytest.mark.parametrize("kind", ["AdamW", "AdamW, fused", "AdamW, foreach", "SGD, momentum"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_optimizer_is_foreseen_as_what_it_wraps_and_still_trains(wrapper: str, kind: str) -> None:
    model = small_model()
    bare = MAKERS[kind](list(model.parameters()))
    wrapped = WRAPPERS[wrapper](bare)
    foreseen, notes = foreseen_state_bytes(wrapped, model)
    assert notes == []
    assert list(map(id, trained_by(bare))) == list(map(id, model.parameters()))  # the very same objects
    assert not bare.state
    before = [parameter.detach().clone() for parameter in model.parameters()]
    take_a_step(wrapped)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [parameter.requires_grad for parameter in model.parameters()]
    assert state_bytes(bare) == foreseen > 0


def test_profiling_with_a_wrapped_optimizer_leaves_training_as_it_is() -> None:
    losses = []
    for is_profiled in (False, True):
        model = small_model()[:2]
        optimizer = Accelerated(torch.optim.AdamW(model.parameters(), fused=True))
        data = torch.ones(4, 7)

        def forward(model: Any = model, data: torch.Tensor = data) -> Any:
            return model(data).square().mean()

        if is_profiled:
            pooch.profile(forward, model, optimizer, mode="fake")
            pooch.profile(forward, model, optimizer, warmup=0, repeats=1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = forward()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3  # it does train


@pytest.mark.parametrize("kind", ["AdamW", "AdamW, fused", "SGD, momentum"])
def test_a_scheduler_and_hooks_on_the_optimizer_are_not_called_and_stay(kind: str) -> None:
    model, calls = small_model(), []
    optimizer = MAKERS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
    optimizer.register_step_post_hook(lambda *given: calls.append("after"))
    of_all = register_optimizer_step_post_hook(lambda *given: calls.append("all"))
    held = dict(vars(optimizer))
    rates = [dict(group) for group in optimizer.param_groups]
    foreseen, notes = foreseen_state_bytes(optimizer, model)
    of_all.remove()
    assert (calls, notes) == ([], [])
    assert vars(optimizer).items() == held.items()
    assert rates == optimizer.param_groups
    take_a_step(optimizer)
    scheduler.step()
    assert state_bytes(optimizer) == foreseen
    assert calls == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[0]["lr"] / 2)


class Averaging(Optimizer):
    """As Lookahead: around another optimizer, with state of its own beside that one's."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([{"params": []}], {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        result = self.optimizer.step(closure)
        for parameter in trained_by(self):
            if parameter.requires_grad:
                self.state[parameter].setdefault("slow", parameter.detach().clone())
        return result


def test_an_optimizer_with_state_of_its_own_around_another_counts_both() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = Averaging(inner)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    foreseen, notes = foreseen_state_bytes(outer, model)
    assert notes == []
    assert not inner.state
    assert not outer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    take_a_step(outer)
    assert state_bytes(outer) + state_bytes(inner) == foreseen


class Hidden(Optimizer):
    """Writes through to an optimizer that nobody finds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.hidden = [optimizer]

    state = property(lambda self: self.hidden[0].state)
    param_groups = property(lambda self: self.hidden[0].param_groups)


def test_an_optimizer_that_hides_its_state_is_refused_in_one_line() -> None:
    model = small_model()
    hidden = Hidden(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ProfileError, match=r"Hidden forwards its state to .* give the optimizer it wraps$"):
        foreseen_state_bytes(hidden, model)


def test_what_is_no_optimizer_is_refused_in_one_line() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"the optimizer is dict: give a torch\.optim\.Optimizer or None"):
        pooch.profile(lambda: model(torch.ones(1, 2)).sum(), model, {"lr": 0.1})  # type: ignore[arg-type]


LOG: dict[str, Any] = {}


class Reaching(Optimizer):
    """Its step changes the real optimizer through a name of the module."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        LOG["real"] = self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        real = LOG["real"]
        real.param_groups[0]["lr"] = 5.0
        real.param_groups[0]["params"] = []
        real.state["new"] = {"count": 1}


def test_a_step_that_reaches_the_real_optimizer_is_undone_and_said() -> None:
    model = small_model()
    optimizer = Reaching(model.parameters())
    _, notes = foreseen_state_bytes(optimizer, model)
    assert "could not be predicted" in notes[0]
    LOG.clear()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert list(trained_by(optimizer)) == list(model.parameters())
    assert not optimizer.state


class Noisy(Optimizer):
    """Draws random numbers and keeps parameters in an attribute, as custom optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.mine:
            if parameter.grad is not None:
                self.state[parameter]["noise"] = torch.randn_like(parameter)
                parameter.add_(self.state[parameter]["noise"])


def test_parameters_held_in_other_attributes_are_not_moved_and_no_random_number_is_drawn() -> None:
    model = small_model()
    optimizer = Noisy(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    foreseen, notes = foreseen_state_bytes(optimizer, model)
    assert notes == []
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    take_a_step(optimizer)
    assert state_bytes(optimizer) == foreseen
