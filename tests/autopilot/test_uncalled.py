"""Programs that call no governed module: their steps begin where something is first saved for a backward pass."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pooch.autopilot import Auto, costs
from pooch.autopilot.costs import link_seen
from pooch.autopilot.finding import ModelFinder
from pooch.autopilot.stacks import has_own_hooks
from pooch.autopilot.uncalled import UncalledSteps
from pooch.ir import HookCosts
from pooch.machine import CopySpeed
from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
SIDE, ROWS, DEPTH = 64, 512, 8
ACTIVATION_BYTES = 4 * ROWS * SIDE
FEW_BYTES = 7 * ACTIVATION_BYTES + 4096  # a step saves nine, and has two more in its backward pass
Train = Callable[[], list[Tensor]]


def weights() -> list[Tensor]:
    torch.manual_seed(3)
    return [(0.1 * torch.randn(SIDE, SIDE)).requires_grad_() for _ in range(DEPTH)]


def loss_of(tensors: list[Tensor], rows: int = ROWS) -> Tensor:
    hidden = torch.randn(rows, SIDE)
    for each in tensors:
        hidden = torch.tanh(hidden @ each)
    return hidden.square().mean()


def stepped(tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for each in tensors:
            if each.grad is not None:
                each -= 0.1 * each.grad
                each.grad = None


def by_hand() -> list[Tensor]:
    """Tensors of no module, a forward pass of functions, and updates by hand."""
    tensors, losses = weights(), []
    for _ in range(6):
        loss = loss_of(tensors)
        loss.backward()
        losses.append(loss.detach())
        stepped(tensors)
    return [*losses, *tensors, torch.get_rng_state()]


def of_several_shapes() -> list[Tensor]:
    tensors = weights()
    for number in range(8):
        loss_of(tensors, ROWS - 128 * (number % 3)).backward()
        stepped(tensors)
    return tensors


def of_two_losses() -> list[Tensor]:
    tensors, others = weights(), weights()
    for _ in range(6):
        hidden = torch.randn(ROWS, SIDE)
        for each in tensors:
            hidden = torch.tanh(hidden @ each)
        scores = hidden.detach()
        for each in others:
            scores = torch.tanh(scores @ each)
        scores.mean().backward()
        stepped(others)
        (hidden - 1).square().mean().backward()
        stepped(tensors)
    return [*tensors, *others]


def with_a_penalty() -> list[Tensor]:
    tensors = weights()
    for _ in range(6):
        rows = torch.randn(ROWS, SIDE, requires_grad=True)
        hidden = rows
        for each in tensors:
            hidden = torch.tanh(hidden @ each)
        (slope,) = torch.autograd.grad(hidden.sum(), rows, create_graph=True)
        (hidden.mean() + slope.square().sum()).backward()
        stepped(tensors)
    return tensors


def with_failures() -> list[Tensor]:
    tensors = weights()
    for number in range(8):
        try:
            loss = loss_of(tensors)
            if number % 3 == 2:
                raise ValueError
            loss.backward()
        except ValueError:
            continue
        stepped(tensors)
    return tensors


def found(train: Train) -> tuple[list[Tensor], ModelFinder, list[str]]:
    gc.collect()
    told = list[str]()
    finder = ModelFinder(live_bytes(CPU) + FEW_BYTES, tell=told.append)
    finder.start()
    try:
        return train(), finder, told
    finally:
        finder.stop()


@pytest.mark.parametrize("train", [by_hand, of_several_shapes, of_two_losses, with_a_penalty, with_failures])
def test_tensors_of_no_module_are_trained_with_the_same_bits_and_values_leave(train: Train) -> None:
    plain = train()
    trained, finder, told = found(train)
    assert all(map(torch.equal, plain, trained))
    assert finder.auto is not None
    summary = finder.auto.summary()
    assert summary.steps_online + summary.steps_on_plan >= 3
    assert summary.swapped_bytes + summary.recomputed_ops > 0
    assert sum("2 backward passes ended before a governed model was called" in line for line in told) == 1
    assert not has_own_hooks()


@pytest.mark.parametrize("first_op", [torch.matmul, torch.mul], ids=["of a weight", "of two activations"])
def test_a_forward_pass_that_is_dropped_is_freed(first_op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Recipes hold what comes from outside of the step, and that its history."""

    def train() -> list[Tensor]:
        for number in range(8):
            rows = torch.randn(ROWS, SIDE, requires_grad=True)
            other = tensors[0] if first_op is torch.matmul else torch.rand(ROWS, SIDE)
            hidden = first_op(rows, other)
            for each in tensors:
                hidden = torch.tanh(hidden @ each)
            if number % 3 != 2:
                hidden.mean().backward()
                stepped(tensors)
        return []

    tensors = weights()
    _, finder, _ = found(train)
    assert finder.auto is not None
    assert finder.auto.summary().steps >= 3
    allocator = counting_allocator()
    assert isinstance(allocator, CountingAllocator)
    user = object()
    allocator.install(user, reads_peak=False)
    try:
        found(train)
        before_bytes = allocator.live_bytes()
        found(train)
        gc.collect()
        assert allocator.live_bytes() <= before_bytes
    finally:
        allocator.remove(user)


def test_no_step_begins_within_a_transform() -> None:
    """Which hides itself while its ops run. What is put in place there would not stay."""

    def train() -> list[Tensor]:
        tensors = weights()
        for number in range(8):
            rows = torch.randn(ROWS, SIDE)
            loss = torch.vmap(lambda row: (row @ tensors[0]).sin().sum())(rows).mean()
            if number % 2:
                loss = loss + loss_of(tensors)
            loss.backward()
            stepped(tensors)
        return tensors

    plain = train()
    trained, finder, _ = found(train)
    assert all(map(torch.equal, plain, trained))
    assert finder.auto is not None
    assert finder.auto.summary().steps >= 3
    assert not has_own_hooks()


def test_the_budget_is_held_from_the_third_backward_pass_on() -> None:
    tensors = weights()
    peaks = list[int]()

    def train() -> list[Tensor]:
        for _ in range(6):
            with MemoryMeter(CPU) as meter:
                loss_of(tensors).backward()
            peaks.append(meter.peak_bytes)
            stepped(tensors)
        return tensors

    gc.collect()
    budget_bytes = live_bytes(CPU) + FEW_BYTES
    found(train)
    assert min(peaks[:2]) > budget_bytes, "otherwise this shows nothing"
    assert max(peaks[2:]) <= budget_bytes


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(each.detach()) for each in weights()])

    def forward(self, rows: int) -> Tensor:
        return loss_of(list(self.parts), rows)


def of_a_model(
    calls: Callable[[Parts, int], Tensor], budget_bytes: int | None = None, *, steps: int = 8
) -> tuple[list[Tensor], Auto | None, list[str]]:
    """Train a model for some steps, under `pooch.auto` if there is a budget. A plan is waited for in the fourth."""
    model, told = Parts(), list[str]()
    gc.collect()
    auto = None if budget_bytes is None else Auto([model], live_bytes(CPU) + budget_bytes, tell=told.append)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nullcontext() if auto is None else auto:
        for step in range(steps):
            while step == 4 and auto is not None and auto.is_planning:
                time.sleep(0.01)
            loss = calls(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()], auto, told


def test_direct_calls_of_forward_are_governed_from_the_second_step_on_and_planned() -> None:
    def call(model: Parts, _: int) -> Tensor:
        return model.forward(ROWS)

    plain, _, _ = of_a_model(call)
    trained, auto, told = of_a_model(call, FEW_BYTES + 2 * ACTIVATION_BYTES)
    assert all(map(torch.equal, plain, trained))
    assert auto is not None
    summary = auto.summary()
    assert summary.steps == 7
    assert summary.steps_on_plan > 0
    assert any(line.startswith("planned for steps of any shape") for line in told)
    assert sum("a backward pass ended before a governed model was called" in line for line in told) == 1
    assert not any("no call of" in line for line in told), "which asks for a region"


def test_modules_that_begin_calls_themselves_are_governed_from_the_second_step_on() -> None:
    class OwnCall(Parts):
        def __call__(self, rows: int) -> Tensor:
            return self.forward(rows)

    model, told = OwnCall(), list[str]()
    with Auto([model], live_bytes(CPU) + FEW_BYTES + 2 * ACTIVATION_BYTES, tell=told.append) as auto:
        for _ in range(4):
            model(ROWS).backward()
            with auto.region():
                loss = model(ROWS)
            loss.backward()
    summary = auto.summary()
    assert summary.steps == 7
    assert summary.swapped_bytes + summary.recomputed_ops > 0
    assert sum("not under the budget" in line for line in told) == 1


def test_once_a_model_is_called_again_and_again_its_steps_begin_there() -> None:
    def call(model: Parts, step: int) -> Tensor:
        return model.forward(ROWS) if step < 3 else model(ROWS)

    plain, _, _ = of_a_model(call)
    trained, auto, _ = of_a_model(call, FEW_BYTES)
    assert all(map(torch.equal, plain, trained))
    assert auto is not None
    assert auto.summary().steps == 7
    assert {key.text for key, _ in auto._driver.library.kept()} <= {"any shape", "no tensors"}
    assert not auto._driver._uncalled.are_usual
    assert not has_own_hooks()


@pytest.mark.parametrize("every", [2, 5])
def test_steps_without_a_call_among_steps_with_one_are_governed_once_one_has_exceeded_the_budget(every: int) -> None:
    def call(model: Parts, step: int) -> Tensor:
        return model(ROWS) if (step + 1) % every else model.forward(ROWS)

    plain, _, _ = of_a_model(call, steps=4 * every)
    trained, auto, told = of_a_model(call, FEW_BYTES, steps=4 * every)
    assert all(map(torch.equal, plain, trained))
    assert auto is not None
    assert auto.summary().steps == 4 * every - 1
    assert sum("not under the budget" in line for line in told) == 1


def test_steps_of_others_beside_a_model_that_fits_are_left_alone() -> None:
    """The budget is not exceeded, so nothing is expected without a call."""
    model, other = Parts(), weights()
    with Auto([model], live_bytes(CPU) + 4 * FEW_BYTES, tell=lambda _: None) as auto:
        for _ in range(3):
            model(ROWS).backward()
            loss_of(other).backward()
            assert not auto._driver._uncalled.are_expected
    assert auto.summary().steps == 3


def test_the_first_saved_tensor_may_not_be_changed_in_place() -> None:
    steps = UncalledSteps(lambda: None)
    steps.expect()
    rows = torch.ones(4, requires_grad=True) + 1
    loss = (rows * rows).sum()
    with torch.no_grad():
        rows += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not has_own_hooks()


def test_hooks_of_the_program_come_and_go_around_those_that_wait() -> None:
    steps = UncalledSteps(lambda: None)
    steps.expect()
    packed = list[Tensor]()
    with saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
        (torch.ones(4, requires_grad=True) + 1).square().sum().backward()
        steps.leave()
        (torch.ones(4, requires_grad=True) + 1).square().sum().backward()
        steps.expect()
        assert not steps.are_expected, "as the program would take ours away in place of its own"
    assert len(packed) == 2
    assert not has_own_hooks()


def test_what_waits_in_a_thread_that_has_ended_is_given_up() -> None:
    steps = UncalledSteps(lambda: None)
    thread = threading.Thread(target=steps.expect)
    thread.start()
    thread.join()
    assert not steps.are_expected
    assert len(steps._waiting) == 1
    steps.expect()
    assert len(steps._waiting) == 1
    steps.leave()
    assert not steps._waiting


def test_removing_a_budget_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    model = Parts()
    with Auto([model], live_bytes(CPU) + FEW_BYTES, tell=lambda _: None) as auto:
        for _ in range(2):
            model.forward(ROWS).backward()
        loss = model.forward(ROWS)
        assert has_own_hooks(), "otherwise no step is running"
        auto.remove()
        assert not has_own_hooks()
        loss.backward()
    assert auto.summary().steps == 2


def test_what_is_measured_within_a_step_is_no_training_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, costs are measured in the training thread, by trainings of a module."""

    def measured(*_: object) -> HookCosts:
        seen.append(1)
        with torch.random.fork_rng():
            for _ in range(2):
                nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        return HookCosts()

    seen = list[int]()
    monkeypatch.setattr(costs, "measure_device_link", lambda *_: link_seen(CopySpeed("a test")))
    monkeypatch.setattr(costs, "measure_hook_costs", measured)
    monkeypatch.setattr(costs, "has_streams", lambda _: True)
    trained, finder, _ = found(by_hand)
    assert seen
    assert all(map(torch.equal, by_hand(), trained))
    assert finder.auto is not None
    assert finder.auto.summary().steps == 4


def test_a_model_that_was_not_given_is_left_alone() -> None:
    model, other = Parts(), weights()
    with Auto([model], live_bytes(CPU) + FEW_BYTES, tell=lambda _: None) as auto:
        for _ in range(3):
            loss_of(other).backward()
        assert not auto._driver._uncalled.are_expected
        model(ROWS).backward()
    assert auto.summary().steps == 1


def test_programs_that_train_modules_are_not_taken_for_others() -> None:
    """A lazy module is left alone while it finds out its shapes, and its first backward pass is no call's."""

    def train() -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.LazyLinear(SIDE), nn.Tanh())
        for _ in range(4):
            model(torch.randn(ROWS, SIDE)).square().mean().backward()
        return list(model.parameters())

    _, finder, told = found(train)
    assert finder.auto is not None
    assert finder.auto.summary().steps == 3
    assert not any("before a governed model was called" in line for line in told)
