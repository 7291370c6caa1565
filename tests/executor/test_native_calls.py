"""Calls that the native watch records: they run again with the bits of the first run, or not at all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pooch.errors import PlanMismatch, ReplayDiffers
from pooch.executor import apply_plan, native_watch, replay
from pooch.executor.mode import following
from pooch.executor.native_watch import NativeWatch
from pooch.executor.replay import replay_call
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.machine import Call
from pooch.torchtools import settings, watch
from pooch.torchtools.tensors import storage_key, storage_of
from tests.executor.online.support import copies_cost, holding, without_collector
from tests.executor.support import all_of, is_same, quick_profile, tight_plan

pytestmark = pytest.mark.cpu

ROWS, WIDTH = 8, 32
OUTSIDE = torch.zeros(())
LARGE = 2**22 + 8  # numbers of a buffer that is too large to be copied before it changes: more than 16 MiB


@pytest.fixture(autouse=True)
def module() -> Any:
    found = watch.LIBRARY.get()
    if found is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")
    return found


@pytest.fixture(autouse=True)
def replays_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e9)


@contextmanager
def unplanned() -> Iterator[Step]:
    """A step without a plan. Its region is entered by `watched`."""
    with without_collector(), holding() as evictor:
        evictor.begin_step(RunStats())
        yield Step(evictor)


@contextmanager
def watched(step: Step) -> Iterator[None]:
    """The region of a step, after the first op, which finds out whether all ops have to come to Python."""
    with following(step):
        OUTSIDE.zero_()  # not of the step, so that it cannot run again
        assert not step.cursor.needs_attention
        yield


def number_of(step: Step, tensor: Tensor) -> int:
    number = step.values.get(storage_key(tensor))
    assert number is not None
    return int(number)


def call_of(step: Step, tensor: Tensor) -> Call | None:
    """The call that made what is in a tensor, if it can run again. It was recorded natively."""
    call = step.owner.recipes.of(number_of(step, tensor))
    assert call is None or is_native(call)
    return call


def is_native(call: Call) -> bool:
    module: Any = watch.LIBRARY.get()
    return type(call.call) is module.Call


def names_of(step: Step) -> list[str]:
    """The operators of the calls that were recorded: all of them natively."""
    calls = step.owner.recipes.calls()
    assert all(map(is_native, calls))
    return [call.call.func.name() for call in calls]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def leave(step: Step) -> None:
    """Have everything leave that autograd holds."""
    with step.lock:
        step.let_kept_leave()
        step.evictor.make_room(2**40)


# Settings -------------------------------------------------------------------------------------------------------------


def nothing_to_read(step: int, written: bool) -> torch.UntypedStorage:
    raise AssertionError("it reads nothing of the step")


OTHER: dict[type, Callable[[Any], list[Any]]] = {
    torch.dtype: lambda was: [torch.float64, torch.bfloat16],
    bool: lambda was: [not was],
    int: lambda was: [was + 1],
    tuple: lambda was: [(True, False), (True, True), (False, True)],
    str: lambda was: ["ieee", "bf16"],
    type(None): lambda was: [torch.bfloat16, torch.float16],
}


@contextmanager
def set_to(knob: Any, value: Any) -> Iterator[None]:
    was = knob.get()
    try:
        knob.set(value)
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        if knob.get() == was:
            pytest.skip(f"{value!r} cannot be set here")
        yield
    finally:
        knob.set(was)


def knobs_and_values() -> list[Any]:
    return [
        pytest.param(knob, value, id=f"{number}-{value}")
        for number, knob in enumerate(settings._KNOBS)
        for value in OTHER[type(knob.get())](knob.get())
    ]


@pytest.mark.parametrize(("knob", "value"), knobs_and_values())
def test_each_setting_is_one_that_a_call_knows(knob: Any, value: Any) -> None:
    """A replay under other settings gives other bits, so the native watch has to know all that Python knows."""
    outside = torch.rand(4)
    with unplanned() as step:
        with watched(step):
            made, under = outside.exp(), settings.settings_now()
            with set_to(knob, value):
                other, others = outside.exp(), settings.settings_now()
        (first, second) = (call_of(step, each) for each in (made, other))
        assert first is not None
        assert second is not None
        assert (first.call.is_as_then, second.call.is_as_then) == (True, False)
        assert (first.call.settings, second.call.settings) == (under, others)
        with set_to(knob, value):
            assert (first.call.is_as_then, second.call.is_as_then) == (False, True)
        assert (first.call.is_as_then, second.call.is_as_then) == (True, False)


def test_every_setting_was_looked_at() -> None:
    assert len({each.id.partition("-")[0] for each in knobs_and_values()}) == len(settings._KNOBS) >= 13


def test_a_replay_runs_under_the_settings_of_the_first_run() -> None:
    with unplanned() as step:
        with watched(step):
            made = torch.arange(4.0)  # its dtype is not given
        expected, call = made.clone(), call_of(step, made)
        assert call is not None
        torch.set_default_dtype(torch.float64)
        try:
            (storage,) = replay_call(call.call, nothing_to_read)
            assert torch.get_default_dtype() == torch.float64
            assert torch.arange(4.0).dtype == torch.float64, "otherwise this shows nothing"
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(bytes_of(storage), bytes_of(storage_of(expected)))


@contextmanager
def kernel_of_tanh(kernel: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", kernel, "CPU", allow_override=True)
        yield


@pytest.mark.parametrize("had_gradients", [True, False])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_replay_runs_under_the_gradient_mode_of_the_first_run(had_gradients: bool, has_gradients: bool) -> None:
    """Some kernels look at it. The backward pass runs without, and more so that of a second derivative."""
    outside, modes = torch.rand(4), list[bool]()

    def noting(rows: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return rows.clone()

    with unplanned() as step, kernel_of_tanh(noting):
        with watched(step), torch.set_grad_enabled(had_gradients):
            made = outside.tanh()
        call = call_of(step, made)
        assert call is not None
        with torch.set_grad_enabled(has_gradients):
            replay_call(call.call, nothing_to_read)
            assert torch.is_grad_enabled() == has_gradients
    assert modes == [had_gradients, had_gradients]


# Replays have the bits of the first run -------------------------------------------------------------------------------


def concatenated(rows: Tensor, outside: Tensor) -> Tensor:
    return torch.cat([rows, outside, rows], 1)


def stacked(rows: Tensor, outside: Tensor) -> Tensor:
    return torch.stack([rows, outside, rows.sin()], 1)


def indexed(rows: Tensor, outside: Tensor) -> Tensor:
    return rows[:, torch.tensor([0, 5, 5, 2])]


def indexed_by_an_op(rows: Tensor, outside: Tensor) -> Tensor:
    return rows[rows.argmax(0), :]


def strided(rows: Tensor, outside: Tensor) -> Tensor:
    return rows[1:, ::2].t() + outside[1:, 1::2].t()


def shifted(rows: Tensor, outside: Tensor) -> Tensor:
    return rows[1:] - rows[:-1]


def in_place(rows: Tensor, outside: Tensor) -> Tensor:
    return rows.clone().add_(outside).mul_(rows).clamp_(min=-0.5)


def in_place_on_itself(rows: Tensor, outside: Tensor) -> Tensor:
    """Two arguments on one storage, one of which is written."""
    copied = rows.clone()
    copied[4:].add_(copied[:4])
    return copied


def cast(rows: Tensor, outside: Tensor) -> Tensor:
    return rows.to(torch.float64).mul(outside.double()).to(dtype=torch.bfloat16).float()


def made_on_a_device(rows: Tensor, outside: Tensor) -> Tensor:
    scale = torch.full((ROWS, 1), 0.1, dtype=torch.float64, device="cpu")
    return rows * scale + torch.arange(WIDTH, dtype=torch.int32, device=torch.device("cpu"))


def numbers(rows: Tensor, outside: Tensor) -> Tensor:
    return torch.add(rows * 0.1 + 3, rows.mul(True), alpha=2).pow(2).div(3, rounding_mode="floor") + outside[0, 0]


def without_dimensions(rows: Tensor, outside: Tensor) -> Tensor:
    return rows * rows.mean() + torch.tensor(2.5).double()


def without_gradients(rows: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (rows * 0.3).cos()
    return rows * mask


def cast_by_autocast(rows: Tensor, outside: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(rows, outside, outside[:, 0]).tanh()


def normalised(rows: Tensor, outside: Tensor) -> Tensor:
    return functional.layer_norm(rows, (WIDTH,), outside[0], outside[1])


def sorted_with_places(rows: Tensor, outside: Tensor) -> Tensor:
    values, places = rows.sort(dim=-1)
    return values * places


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "cat": (concatenated, "aten::cat"),
    "stack": (stacked, "aten::stack"),
    "index": (indexed, "aten::index.Tensor"),
    "index of the step": (indexed_by_an_op, "aten::index.Tensor"),
    "strides": (strided, "aten::add.Tensor"),
    "one storage twice": (shifted, "aten::sub.Tensor"),
    "in place": (in_place, "aten::clamp_"),
    "in place on itself": (in_place_on_itself, "aten::add_.Tensor"),
    "dtypes": (cast, "aten::_to_copy"),
    "devices": (made_on_a_device, "aten::full"),
    "numbers": (numbers, "aten::div.Tensor_mode"),
    "0-dim": (without_dimensions, "aten::mean"),
    "no_grad": (without_gradients, "aten::cos"),
    "autocast": (cast_by_autocast, "aten::addmm"),
    "layer_norm": (normalised, "aten::native_layer_norm"),
    "several results": (sorted_with_places, "aten::sort"),
}


class Around(nn.Module):
    """Layers around what is looked at."""

    outside: Tensor

    def __init__(self, inside: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(WIDTH, WIDTH), inside
        self.register_buffer("outside", torch.rand(WIDTH, WIDTH))
        self.after: Callable[[], object] = lambda: None

    def forward(self, rows: Tensor) -> Tensor:
        made = self.inside(self.first(rows).tanh(), self.outside[: self.outside_rows])
        made = made.sin().exp()
        self.after()
        return made.square().mean()

    @property
    def outside_rows(self) -> int:
        return WIDTH if self.inside is cast_by_autocast else ROWS


@contextmanager
def replayed_natively(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that Python replays from calls that were recorded natively, as where a profiler is on.

    `test_native_replays.py` has the replays that are made natively as well.
    """
    found: list[str] = []
    real = replay._replay_native

    def noting(call: Any, resolve: Any) -> Any:
        found.append(call.func.name())
        return real(call, resolve)

    with monkeypatch.context() as patch:
        patch.setattr(replay, "_replay_native", noting)
        patch.setattr(native_watch, "native_actions", lambda step: None)
        yield found


def trained(model: nn.Module, rows: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(rows)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach().clone(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def all_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_plan_replays_has_the_bits_of_the_first_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, operator = KINDS[kind]
    torch.manual_seed(0)
    model, rows = Around(inside), torch.randn(ROWS, WIDTH)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    expected = trained(model, rows)
    with apply_plan(plan, model) as run, replayed_natively(monkeypatch) as found:
        for _ in range(3):  # the first one is recorded in Python, which finds out how the ops look
            found.clear()
            assert all_same(trained(model, rows), expected)
            assert run.stats.mismatches == 0
        assert run.stats.recomputed_ops == len(found)
    assert operator in found


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_without_a_plan_replays_has_the_bits_of_the_first_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, operator = KINDS[kind]
    torch.manual_seed(0)
    model, rows = Around(inside), torch.randn(ROWS, WIDTH)
    expected = trained(model, rows)
    model.zero_grad()
    with unplanned() as step, replayed_natively(monkeypatch) as found:
        with watched(step):
            loss = model(rows)
        assert operator in names_of(step)
        leave(step)
        loss.backward()
        assert operator in found
        assert step.stats.swapped_in_bytes == 0
    assert all_same([loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()], expected)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_chain_runs_again_from_what_is_outside(kind: str) -> None:
    inside, _ = KINDS[kind]
    model, rows = Around(inside), torch.randn(ROWS, WIDTH)
    with unplanned() as step:
        with watched(step), torch.no_grad():
            made = inside(model.first(rows).tanh(), model.outside[: model.outside_rows])
        assert names_of(step)
        number, expected = number_of(step, made), bytes_of(storage_of(made))
        for _ in range(2):  # what runs again changes nothing
            assert torch.equal(bytes_of(step.owner.recipes.make_again(number)), expected)


class Normed(nn.Module):
    """A batch norm between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.first(rows).tanh()).sin().exp().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("has_plan", [True, False])
def test_running_statistics_are_updated_once(
    is_training: bool, has_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, rows = Normed(), torch.randn(ROWS, WIDTH)
    model(rows)
    model.train(is_training)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    model.load_state_dict(state)
    expected = [trained(model, rows) for _ in range(3)]
    model.load_state_dict(state)
    found: list[list[Tensor]] = []
    with replayed_natively(monkeypatch) as again:
        if has_plan:
            with apply_plan(plan, model):
                for _ in range(3):
                    again.clear()
                    found.append(trained(model, rows))
        for _ in range(0 if has_plan else 3):
            model.zero_grad()
            with unplanned() as step:
                with watched(step):
                    loss = model(rows)
                leave(step)
                loss.backward()
            gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
            found.append([each.clone() for each in [loss.detach(), *gradients, *model.buffers()]])
    assert any("batch_norm" in each for each in again)
    assert all(map(all_same, found, expected))


# What changes in between ----------------------------------------------------------------------------------------------


class Changing(nn.Module):
    """Adds a buffer, and changes a tensor after that: one which nothing has read, until it is told otherwise."""

    buffer: Tensor

    def __init__(self, size: int, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self._change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("buffer", torch.rand(size))
        self.changed: Any = torch.rand(size)

    def forward(self, rows: Tensor) -> Tensor:
        added = self.first(rows).tanh() + self.buffer[:WIDTH]
        made = added.sin().exp()
        with torch.no_grad():
            self._change(self.changed)
        return made.mean()  # type: ignore[no-any-return]


def by_an_op(tensor: Tensor) -> None:
    tensor.mul_(0.5)


def by_data(tensor: Tensor) -> None:
    """Raises no version that anybody looks at."""
    tensor.data.mul_(0.5)


class Renormed(nn.Module):
    """Reads running statistics as data before a batch norm updates them, which raises no version."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (self.first(rows).tanh() + self.norm.running_mean).sin().exp()
        return self.norm(hidden).sin().mean()  # type: ignore[no-any-return]


@contextmanager
def all_replayed(model: nn.Module, rows: Tensor, **options: Any) -> Iterator[Any]:
    """Under a plan that replays everything, after two steps, so that calls are recorded natively."""
    state = {name: each.clone() for name, each in model.state_dict().items()}
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    model.load_state_dict(state)
    with apply_plan(plan, model, **options) as run:
        for _ in range(2):
            trained(model, rows)
        yield run


@pytest.mark.parametrize("change", [by_an_op, by_data])
def test_a_small_buffer_is_copied_before_it_changes(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rows = Changing(WIDTH, change), torch.randn(ROWS, WIDTH)
    plain = Changing(WIDTH, change)
    plain.load_state_dict(model.state_dict())
    with all_replayed(model, rows) as run, replayed_natively(monkeypatch) as found:
        model.changed, plain.changed = model.buffer, plain.buffer
        for _ in range(3):
            found.clear()
            assert all_same(trained(model, rows), trained(plain, rows))
            assert run.stats.mismatches == 0
            assert "aten::add.Tensor" in found
    assert not run.verified.differences


def test_running_statistics_are_copied_before_they_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plain, rows = Renormed(), Renormed(), torch.randn(ROWS, WIDTH)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        trained(plain, rows)
    with all_replayed(model, rows) as run, replayed_natively(monkeypatch) as found:
        for _ in range(3):
            found.clear()
            assert all_same(trained(model, rows), trained(plain, rows))
            assert "aten::add.Tensor" in found
    assert not run.verified.differences


@pytest.mark.parametrize("change", [by_an_op, by_data])
def test_a_large_buffer_that_has_changed_is_refused(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its version; and where that is not raised, as other bytes come of it."""
    torch.manual_seed(0)
    model, rows = Changing(LARGE, change), torch.randn(ROWS, WIDTH)
    how = "modified by an inplace operation" if change is by_an_op else "gave other bits"
    with all_replayed(model, rows, verify="off" if change is by_an_op else "always") as run:
        trained(model, rows)
        model.changed = model.buffer
        with replayed_natively(monkeypatch) as found, pytest.raises(ReplayDiffers, match=how):
            trained(model, rows)
        assert run.stats.mismatches == 0
        assert "aten::add.Tensor" in found


@pytest.mark.parametrize("has_plan", [True, False])
def test_a_parameter_that_is_given_other_data_is_read_as_it_was(
    has_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain training has computed with what was there."""
    torch.manual_seed(0)
    scale, other = nn.Parameter(torch.rand(WIDTH)), torch.rand(WIDTH)
    model, rows = Around(lambda hidden, outside: (hidden + scale).sin()), torch.randn(ROWS, WIDTH)

    def give_other_data() -> None:
        scale.data = other

    def train(train_once: Callable[[nn.Module, Tensor], list[Tensor]]) -> list[Tensor]:
        scale.data, scale.grad, model.after = torch.ones(WIDTH), None, give_other_data
        found = train_once(model, rows)
        gradient: Any = scale.grad
        return [*found, gradient.clone()]

    def train_unplanned(model: nn.Module, rows: Tensor) -> list[Tensor]:
        model.zero_grad()
        with unplanned() as step:
            with watched(step):
                loss = model(rows)
            leave(step)
            loss.backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        return [each.clone() for each in [loss.detach(), *gradients, *model.buffers()]]

    with all_replayed(model, rows) if has_plan else nullcontext(), replayed_natively(monkeypatch) as found:
        again = train(trained if has_plan else train_unplanned)
    assert "aten::add.Tensor" in found
    assert all_same(again, train(trained))


# Without a plan -------------------------------------------------------------------------------------------------------


def chain(outside: Tensor) -> tuple[Tensor, Tensor]:
    """A value that autograd saves and the program lets go of, and what the caller goes on with."""
    leaf = torch.rand(ROWS, WIDTH, requires_grad=True)
    return leaf, (leaf + outside).sin()


@pytest.mark.parametrize("change", [by_an_op, by_data])
def test_what_a_call_has_read_comes_back_before_it_changes(change: Any) -> None:
    outside = torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            leaf, made = chain(outside)
            expected = (leaf.detach() + outside).cos()
            leave(step)
            (value,) = [each for each in step.owner.saved.values() if each.handles]
            call = step.owner.recipes.of(value.number)
            assert call is not None
            assert is_native(call)
            states = [value.state]
            change(outside)
            assert [*states, value.state] == ["unmade", "here"]
            assert step.owner.recipes.of(value.number) is None
            later = made.detach().exp()
            for each in (made, later):
                assert call_of(step, each) is None, "what is made from it is not what it was"
        made.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("change", [by_an_op, by_data])
def test_what_a_call_that_python_has_recorded_has_read_is_known_too(change: Any) -> None:
    outside = torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            drawn = torch.bernoulli(outside)
            made = drawn.exp()
        call = step.owner.recipes.of(number_of(step, drawn))
        assert call is not None
        assert not is_native(call), "it draws random numbers"
        assert call_of(step, made) is not None
        expected = bytes_of(storage_of(made))
        assert torch.equal(bytes_of(step.owner.recipes.make_again(number_of(step, made))), expected)
        with watched(step):
            change(outside)
        assert step.owner.recipes.of(number_of(step, drawn)) is None
        assert call_of(step, made) is None


def test_what_is_outside_may_be_given_other_data_that_changes() -> None:
    outside, other = torch.rand(WIDTH), torch.zeros(WIDTH)
    with unplanned() as step:
        with watched(step):
            made = outside.exp()
        expected, call = bytes_of(storage_of(made)), call_of(step, made)
        assert call is not None
        outside.data = other
        outside.add_(1)
        (storage,) = replay_call(call.call, nothing_to_read)
        assert torch.equal(bytes_of(storage), expected)


def test_what_is_outside_and_has_no_memory_any_more_is_refused() -> None:
    outside = torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            made = outside.exp()
        call = call_of(step, made)
        assert call is not None
        storage_of(outside).resize_(0)
        with pytest.raises(PlanMismatch, match="storage is empty"):
            replay_call(call.call, nothing_to_read)


def test_running_statistics_that_a_call_has_read_make_it_give_up() -> None:
    """A batch norm writes them without saying so."""
    norm, rows = nn.BatchNorm1d(WIDTH), torch.randn(ROWS, WIDTH)
    with unplanned() as step:
        with watched(step):
            assert norm.running_mean is not None
            read = rows + norm.running_mean
            other = rows + norm.weight.detach()
            norm(rows)
        assert call_of(step, read) is None
        assert call_of(step, other) is not None


def test_statistics_that_the_step_has_made_hold_another_value_once_they_are_updated() -> None:
    rows = torch.randn(ROWS, WIDTH)
    with unplanned() as step:
        with watched(step):
            mean, variance = rows.mean(0), rows.var(0)
            before = number_of(step, mean)
            read = mean * 2
            functional.batch_norm(rows, mean, variance, training=True)
            again = mean * 2
        assert number_of(step, mean) > before
        assert call_of(step, read) is not None
        assert call_of(step, again) is None
        expected = bytes_of(storage_of(read))
        assert torch.equal(bytes_of(step.owner.recipes.make_again(number_of(step, read))), expected)


def test_calls_on_memory_whose_address_the_program_has_are_given_up() -> None:
    outside = torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            before, other = outside.exp(), torch.ones(4).exp()
            made = outside.sin()
            of_made = made.cos()
            outside.data_ptr()
            after = outside.exp()
            made.numpy()
            later = made.cos()
            fine = torch.ones(4).cos()
        for each in (before, after, made, of_made, later):
            assert call_of(step, each) is None
        for each in (other, fine):
            assert call_of(step, each) is not None


def test_an_op_that_writes_to_what_is_outside_does_not_run_again() -> None:
    outside, rows = torch.rand(WIDTH), torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            outside.add_(rows)
            torch.exp(rows, out=outside)
            made = rows.exp()
            made.add_(rows)
        assert names_of(step) == ["aten::exp", "aten::add_.Tensor"]
        assert call_of(step, outside) is None
        expected = bytes_of(storage_of(made))
        assert torch.equal(bytes_of(step.owner.recipes.make_again(number_of(step, made))), expected)


def test_each_new_content_of_a_storage_is_another_value() -> None:
    rows = torch.rand(WIDTH)
    with unplanned() as step:
        with watched(step):
            made = rows.exp()
            first = number_of(step, made)
            read = made.cos()
            made.add_(rows)
            second = number_of(step, made)
            made.mul_(rows)
            third = number_of(step, made)
        assert len({first, second, third, number_of(step, read)}) == 4
        expected = (rows.exp() + rows) * rows
        recipes = step.owner.recipes
        for number, tensor in ((third, expected), (read_number := number_of(step, read), rows.exp().cos())):
            assert torch.equal(bytes_of(recipes.make_again(number)), bytes_of(storage_of(tensor))), read_number


def test_recipes_that_differ_have_different_numbers() -> None:
    """What is known of a recipe must not be believed of another one."""

    def numbers(second: bool, function: Callable[[Tensor], Tensor]) -> list[int]:
        with unplanned() as step:
            with watched(step):
                sorted_rows = torch.arange(8.0).flip(0).sort()
                made = function(sorted_rows[second].double())
            call = call_of(step, made)
            assert call is not None
            return [call.recipe]

    assert numbers(False, torch.exp) == numbers(False, torch.exp)
    assert numbers(False, torch.exp) != numbers(True, torch.exp), "another result of the same op"
    assert numbers(False, torch.exp) != numbers(False, torch.cos)
    assert numbers(False, torch.exp) != numbers(False, lambda rows: rows.exp().exp())


def test_ops_that_overlap_are_not_recorded() -> None:
    begun, over, rows = threading.Event(), threading.Event(), torch.rand(4)
    made: dict[str, Tensor] = {}

    def waiting(each: Tensor) -> Tensor:
        begun.set()
        assert over.wait(60)
        return each.clone()

    with unplanned() as step, kernel_of_tanh(waiting):

        def beside() -> None:
            with watched(step):
                made["tanh"] = torch.tanh(rows)

        thread = threading.Thread(target=beside)
        with watched(step):
            made["before"] = torch.exp(rows)
            thread.start()
            assert begun.wait(60)
            made["exp"] = torch.exp(rows)
            over.set()
            thread.join(60)
            # The other one is done now, and whoever is alone is recorded again.
        with watched(step):
            made["after"] = torch.exp(rows)
        calls = {name: call_of(step, each) for name, each in made.items()}
        assert {name for name, call in calls.items() if call is not None} == {"before", "after"}


def conjugated() -> Tensor:
    return torch.rand(4, dtype=torch.complex64).conj()


def negated() -> Tensor:
    return torch.rand(4, dtype=torch.complex64).conj().imag


class Seen(Tensor):
    """A subclass that sees functions."""


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.rand(4)


UNUSUAL: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "subclass": (lambda: torch.rand(4).as_subclass(Seen), True),
    "parameter": (lambda: nn.Parameter(torch.rand(4)), True),
    "inference": (in_inference_mode, True),
    "conjugate": (conjugated, False),
    "negative": (negated, False),
    "sparse": (lambda: torch.eye(4).to_sparse(), False),
    "meta": (lambda: torch.rand(4, device="meta"), False),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_not_all_in_their_bytes_come_to_python(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, is_ordinary = UNUSUAL[kind]
    given = make()
    expected = torch.sqrt(given)
    seen: list[str] = []
    real = NativeWatch.before

    def before(watching: NativeWatch, func: Any, *given: Any) -> Any:
        seen.append(func.name())
        return real(watching, func, *given)

    monkeypatch.setattr(NativeWatch, "before", before)
    with unplanned() as step:
        with watched(step):
            made = torch.sqrt(given)
        assert ({"aten::sqrt", "aten::clone"}.isdisjoint(seen)) == is_ordinary
        if kind in ("sparse", "meta"):
            assert step.owner.recipes.calls() == []
            return
        assert is_same(made, expected)
        assert all(map(is_native, step.owner.recipes.calls())) == is_ordinary
        storage = step.owner.recipes.make_again(number_of(step, made))
        assert torch.equal(bytes_of(storage), bytes_of(storage_of(expected)))


def test_what_the_step_has_made_unseen_is_not_from_outside() -> None:
    """The values of a sparse tensor are no ordinary result, and hold the step by their history."""
    leaf = torch.rand(4, requires_grad=True)
    before = torch.rand(4, requires_grad=True) * 2
    with unplanned() as step:
        with watched(step):
            unseen = (leaf * 2).to_sparse().coalesce().values()
            assert step.values.get(storage_key(unseen)) is None, "otherwise this shows nothing"
            made, other, view = unseen.exp(), before.exp(), before[1:].exp()
        assert call_of(step, made) is None
        assert call_of(step, other) is not None
        assert call_of(step, view) is not None


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_was_written_over_since_it_was_saved_stays(is_taken: bool) -> None:
    """Plain autograd reads what is there by then."""
    leaf = torch.rand(ROWS, WIDTH, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            hidden = leaf + 1
            made = hidden.sin()
            number = number_of(step, hidden)
            if is_taken:
                leave(step)
            by_data(hidden)
            assert step.cursor.is_written_over(number) == (not is_taken)
            assert not step.cursor.is_written_over(number + 1)
        expected = hidden.detach().cos()
        del hidden
        leave(step)
        made.sum().backward()
        assert step.stats.recomputed_ops == 0
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected)


def test_python_hears_of_writes_to_what_it_holds_from_the_start() -> None:
    """A conjugate view is saved by Python, before anything has had to leave."""
    rows = torch.rand(4, dtype=torch.complex64, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            made = rows.exp()
            number = number_of(step, made)
            read = made.detach().conj() * rows
            assert number in step.owner.saved
            held = step.owner.saved[number]
            made.detach().mul_(2)
        assert held.changed
        assert number not in step.owner.saved
        del read


def test_once_python_holds_values_it_holds_those_that_come_as_well() -> None:
    """So that they are copied ahead of need like the others."""
    leaf = torch.rand(ROWS, WIDTH, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            first, second = leaf + 1, leaf + 2
            losses = [first.sin()]
            assert number_of(step, first) not in step.owner.saved
            leave(step)
            losses.append(second.sin())
            assert {number_of(step, first), number_of(step, second)} <= step.owner.saved.keys()
        sum(each.sum() for each in losses).backward()  # type: ignore[union-attr]


def test_python_looks_now_and_then_whether_room_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(Step, "look_ahead", lambda step: looks.append(1))
    leaf = torch.rand(4, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            losses = [leaf.sin() for _ in range(100)]
        assert len(losses) == 100
    assert 2 <= len(looks) <= 10


def test_what_is_only_copied_leaves_unless_the_program_may_change_it_unseen() -> None:
    """Without a watch of ops: a parameter may be given other data, which plain training would read."""
    scale, inputs = nn.Parameter(torch.rand(ROWS, WIDTH)), torch.rand(ROWS, WIDTH)
    with without_collector(), holding() as evictor:
        evictor.begin_step(RunStats())
        step = Step(evictor, replays=False)
        with following(step):
            hidden = inputs.exp()
            expected_gradient = hidden.clone()
            made = (hidden * scale).sum()
            assert step.values.get(storage_key(hidden)) is not None
            assert step.values.get(storage_key(scale)) is None
            del hidden
        leave(step)
        assert step.stats.swapped_out_bytes == ROWS * WIDTH * 4
        made.backward()
        assert scale.grad is not None
        assert torch.equal(scale.grad, expected_gradient)


def test_what_a_step_holds_by_number_is_what_was_put_there_last() -> None:
    held: Any = watch.region(None, watch.storage_map()).sources
    one, other = (storage_of(torch.rand(4)) for _ in range(2))
    assert held.get(3) is None
    assert held.pop(3, "nothing") == "nothing"
    held[3], held[4] = one, one
    held[3] = other
    assert held.get(3).data_ptr() == other.data_ptr()
    assert 3 in held
    assert held.pop(3).data_ptr() == other.data_ptr()
    assert 3 not in held
    assert held.get(3) is None
    assert held.get(4).data_ptr() == one.data_ptr()


def test_a_recipe_keeps_no_storage_of_the_step() -> None:
    with unplanned() as step:
        rows = torch.rand(WIDTH)
        with watched(step):
            inside = rows.exp()
            made = [inside.sin(), torch.cat([inside, inside]), inside.clone().add_(inside)]
            gone = [weakref.ref(storage_of(each)) for each in (inside, *made)]
            del inside, made
        assert all(each() is None for each in gone)
        assert "aten::cat" in names_of(step)
        outside = weakref.ref(storage_of(rows))
        del rows
        assert outside() is not None, "a replay would read it"
        del step
    gc.collect()
    assert outside() is None


# Handles --------------------------------------------------------------------------------------------------------------


class HandledValue:
    """What a handle is on."""

    handles = 0
    itself: Any = None


class Handled:
    """A native handle by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.ended: list[Any] = []
        self.value = HandledValue()
        module: Any = watch.LIBRARY.get()
        self.handle = module.Handle(SimpleNamespace(), self.value, tensor, self.ended.append)


def test_a_handle_counts_itself_and_tells_of_its_end() -> None:
    handled = Handled(torch.rand(4))
    assert handled.value.handles == 1
    assert handled.handle.value is handled.value
    assert handled.ended == []
    del handled.handle
    assert handled.ended == [handled.value]


def test_a_handle_gives_its_tensor_on_another_storage() -> None:
    tensor = torch.rand(6, 8)[1:, ::2].t()
    handled, other = Handled(tensor), storage_of(torch.rand(48))
    found = handled.handle.on(other)
    assert (found.shape, found.stride(), found.storage_offset(), found.dtype) == (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
    )  # fmt: skip
    assert found.untyped_storage().data_ptr() == other.data_ptr()


def test_a_handle_tells_of_changes_since() -> None:
    tensor = torch.rand(2, 3, dtype=torch.float64)
    tensor.add_(1)
    handled = Handled(tensor)
    handled.handle.check()
    tensor.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float64 \[2, 3\]\]"):
        handled.handle.check()


def test_a_change_after_the_region_is_pytorchs_error(module: Any) -> None:
    leaf = torch.rand(ROWS, WIDTH, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            hidden = leaf + 1
            made = hidden.sin()
        leave(step)
        assert step.owner.saved[number_of(step, hidden)].handles == 1
        hidden.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_handle_that_autograd_drops_frees_its_bytes(is_elsewhere: bool) -> None:
    leaf = torch.rand(ROWS, WIDTH, requires_grad=True)
    with unplanned() as step:
        with watched(step):
            made = [(leaf + 1).sin()]
            gone = weakref.ref(storage_of(made[0].grad_fn._saved_self))  # type: ignore[union-attr]
        with step.lock:
            step.let_kept_leave()
        assert gone() is not None
        assert [each.handles for each in step.owner.saved.values() if each.handles] == [1]
        if is_elsewhere:
            with step.lock:  # whoever destroys a handle never waits for it
                thread = threading.Thread(target=made.clear)
                thread.start()
                thread.join(60)
                assert not thread.is_alive()
        else:
            made.clear()
        assert gone() is None
        assert step.owner.saved == {}


def test_a_cycle_through_a_handle_is_collected() -> None:
    handled = Handled(torch.rand(4))
    handled.value.itself = handled.handle
    gone = weakref.ref(handled.value)
    ended: list[int] = []
    weakref.finalize(handled.value, ended.append, 1)
    handled.ended.clear()
    del handled
    assert gone() is not None
    gc.collect()
    assert gone() is None
    assert ended == [1]
