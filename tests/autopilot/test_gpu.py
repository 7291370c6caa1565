"""`pooch.auto` on a device with streams: its plans are made for that device, and not for the CPU beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pooch.autopilot import Auto, auto
from pooch.autopilot.finding import ModelFinder
from pooch.executor.engines import make_engine
from pooch.ir import HookCosts, Op, Profile
from tests.executor.online.zoo import WIDTH, Layers
from tests.executor.support import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")
ROWS, ROOM_BYTES = 2048, 5 * 2**20  # the step's activations take about twice that
SLEEP_MS = 10.0
CYCLES_PER_MS = 2.5e6  # more than any device has


@torch.library.custom_op("pooch_tests::slow_tanh", mutates_args=())
def slow_tanh(argument: Tensor) -> Tensor:
    """An op that is launched in no time, and keeps the device busy."""
    torch.cuda._sleep(int(SLEEP_MS * CYCLES_PER_MS))
    return argument.tanh()


@torch.library.custom_op("pooch_tests::slow_tanh_backward", mutates_args=())
def slow_tanh_backward(gradient: Tensor, result: Tensor) -> Tensor:
    torch.cuda._sleep(int(SLEEP_MS * CYCLES_PER_MS))
    return gradient * (1 - result * result)


slow_tanh.register_autograd(
    lambda ctx, gradient: slow_tanh_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def train(model: nn.Module, steps: int, auto: Auto | None = None) -> dict[str, Tensor]:
    torch.manual_seed(2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        loss = model(torch.randn(ROWS, WIDTH, device=CUDA)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        while auto is not None and auto.is_planning:
            time.sleep(0.05)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {"losses": torch.stack(losses), "random state": torch.cuda.get_rng_state()}


def a_model(activate: object = torch.tanh) -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: activate(hidden) * hidden.sigmoid(), depth=6).to(CUDA)  # type: ignore[operator]


@pytest.fixture
def held() -> Iterator[tuple[nn.Module, Auto]]:
    """A model under a budget that its activations pass. A step before it has made the libraries' workspaces."""
    model = a_model(slow_tanh)
    train(model, 1)
    model = a_model(slow_tanh)
    budget_bytes = torch.cuda.memory_allocated() + ROOM_BYTES
    with Auto([model], budget_bytes, tell=lambda _: None) as auto:
        yield model, auto


def profile_of(auto: Auto) -> Profile:
    ((_, profile, plan),) = auto.planned
    assert plan.schedule.actions
    return profile


def test_a_plan_is_made_with_the_link_of_the_device_and_followed(held: tuple[nn.Module, Auto]) -> None:
    plain = train(a_model(slow_tanh), 5)
    model, auto = held
    assert_same(plain, train(model, 5, auto))
    profile, engine = profile_of(auto), make_engine(CUDA)
    assert profile.device.kind == "cuda"
    assert profile.link.tier == engine.description
    assert profile.hooks != HookCosts()  # they were measured
    engine.close()
    summary = auto.summary()
    assert summary.steps_on_plan
    assert summary.steps_over_budget <= summary.steps_online


def test_op_times_are_those_of_the_device(held: tuple[nn.Module, Auto]) -> None:
    """Launching these ops takes a small part of the time that the device is busy with them."""
    model, auto = held
    train(model, 4, auto)
    profile = profile_of(auto)

    def is_slow(op: Op) -> bool:
        return "slow_tanh" in op.name

    forward = [op for op in profile.ops if is_slow(op) and op.phase == "forward"]
    assert len(forward) == 6
    assert all(op.time_ms >= SLEEP_MS for op in forward)
    assert sum(op.time_ms for op in profile.ops if op.phase == "backward") >= 6 * SLEEP_MS
    assert all(op.host_ms <= op.time_ms + 6 * SLEEP_MS for op in profile.ops)
    assert sum(op.host_ms for op in profile.ops) < profile.step_ms


def test_peak_counters_of_a_program_are_those_of_a_plain_run() -> None:
    """Where nothing moves. The program resets them once."""
    names = ("allocated_bytes.all.peak", "active_bytes.all.peak")

    def peaks_of(auto_budget: str | None) -> list[list[int]]:
        model = Layers(torch.tanh).to(CUDA)
        told = []
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run = None if auto_budget is None else auto(model, auto_budget, quiet=True)
        for number in range(3):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            train(model, 3)
            stats = torch.cuda.memory_stats()
            told.append([torch.cuda.max_memory_allocated() - start, *(stats[name] - start for name in names)])
        if run is not None:
            run.remove()
        return told

    train(Layers(torch.tanh).to(CUDA), 1)  # libraries take their workspaces
    assert peaks_of(None) == peaks_of("3GiB")


def trained_tensors(steps: int = 6) -> tuple[list[Tensor], list[int]]:
    """Train tensors of no module, and return them and the peak of each step."""
    torch.manual_seed(3)
    weights = [(0.1 * torch.randn(WIDTH, WIDTH, device=CUDA)).requires_grad_() for _ in range(8)]
    peaks = list[int]()
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        hidden = torch.randn(ROWS, WIDTH, device=CUDA)
        for each in weights:
            hidden = torch.tanh(hidden @ each)
        hidden.square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        with torch.no_grad():
            for each in weights:
                each -= 0.1 * each.grad
                each.grad = None
    return [*weights, torch.cuda.get_rng_state()], peaks


def test_tensors_of_no_module_are_trained_within_the_budget() -> None:
    """The device is that of what a backward pass begins with."""
    trained_tensors(1)
    plain, plain_peaks = trained_tensors()
    activation_bytes = 4 * ROWS * WIDTH
    budget_bytes = torch.cuda.memory_allocated() + 11 * activation_bytes
    assert max(plain_peaks) > budget_bytes, "otherwise nothing has to leave"
    finder = ModelFinder(budget_bytes, tell=lambda _: None)
    finder.start()
    try:
        trained, _ = trained_tensors()
    finally:
        finder.stop()
    assert all(map(torch.equal, plain, trained))
    assert finder.auto is not None
    summary = finder.auto.summary()
    assert summary.steps == 4
    assert summary.swapped_bytes + summary.recomputed_ops > 0
    assert summary.steps_over_budget <= 1, "what ops need beside their results is known after the first step"
