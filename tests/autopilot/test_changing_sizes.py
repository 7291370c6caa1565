"""Steps in which the data decides on sizes, as how many rows an expert gets, or on which ops there are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.autopilot import Auto
from pooch.autopilot.library import MOST_LOST_PLANS, OTHER_OPS
from pooch.executor import mode
from pooch.executor.planned_values import PlannedValues
from pooch.torchtools import watch
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.online.support import run_plainly
from tests.executor.online.zoo import WIDTH, rows, trained
from tests.executor.support import assert_same

pytestmark = pytest.mark.cpu
ROWS, STEPS = 512, 16
IS_NATIVE = mode.is_native
Found = dict[str, Tensor]


@pytest.fixture(params=["native", "mode"], autouse=True)
def _watched_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "mode":
        monkeypatch.setattr(mode, "is_native", lambda _: False)
    elif watch.LIBRARY.get() is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")


class Experts(nn.Module):
    """Each row goes through one of three experts, and the data says which. All of them get some in each step."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
            for _ in range(3)
        )

    def forward(self, given: Tensor) -> Tensor:
        scores = self.router(given).softmax(-1)
        chosen, result = scores.argmax(-1), torch.zeros_like(given)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            assert len(mine)
            result = result.index_add(0, mine, expert(given[mine]) * scores[mine, number, None])
        return result


class Wandering(nn.Module):
    """Has another activation in one of its layers, and in another one with each call."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)), 0

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            given = torch.sigmoid(layer(given)) if self.calls % len(self.layers) == number else torch.tanh(layer(given))
        return given


def experts() -> nn.Module:
    torch.manual_seed(1)
    return Experts(4)


def wandering() -> nn.Module:
    torch.manual_seed(1)
    return Wandering()


def train(model: nn.Module, steps: int, auto: Auto | None = None) -> Found:
    torch.manual_seed(2)
    losses = list[Tensor]()
    for _ in range(steps):
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        losses.append(loss.detach())
        while auto is not None and auto.is_planning:
            time.sleep(0.02)  # the test's time limit ends it
    return {name: each.clone() for name, each in model.state_dict().items()} | {"losses": torch.stack(losses)}


def trained_under(make: Callable[[], nn.Module], steps: int, share: float, told: list[str]) -> tuple[Found, Any]:
    """Train within a share of what the activations of a step take."""
    step_bytes = run_plainly(lambda: trained(make(), rows(ROWS))).peak_bytes
    model = make()
    gc.collect()
    gradients_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget_bytes = live_bytes(torch.device("cpu")) + gradients_bytes + int(share * step_bytes)
    with Auto([model], budget_bytes, tell=told.append) as auto:
        found = train(model, steps, auto)
    return found, auto.summary()


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes of values that plans copy in Python, each beside that which was planned."""
    found, start = list[tuple[int, int]](), PlannedValues._start_out

    def start_out(self: PlannedValues, value: Any, size_bytes: int) -> None:
        found.append((size_bytes, self.table.room_bytes[value.number]))
        start(self, value, size_bytes)

    monkeypatch.setattr(PlannedValues, "_start_out", start_out)
    return found


def test_a_plan_is_followed_whatever_sizes_the_data_gives(copied_bytes: list[tuple[int, int]]) -> None:
    plain, told = train(experts(), STEPS), list[str]()
    found, summary = trained_under(experts, STEPS, 0.6, told)
    assert_same(plain, found)
    assert summary.steps_over_budget == 0
    assert summary.steps_left_plan == 1, "of which it is learned that sizes change"
    assert summary.steps_recorded == 1
    assert summary.steps_on_plan >= STEPS - 5
    assert summary.swapped_bytes or summary.recomputed_ops
    (line,) = [each for each in told if "sizes within them change from step to step" in each]
    assert line.startswith(f"steps of {ROWS}x{WIDTH}: ")
    if copied_bytes:
        assert any(size_bytes > planned_bytes for size_bytes, planned_bytes in copied_bytes)


def test_steps_that_never_do_the_same_are_planned_no_longer_and_told_so() -> None:
    steps = 6 * (MOST_LOST_PLANS + 2)
    plain, told = train(wandering(), steps), list[str]()
    found, summary = trained_under(wandering, steps, 0.8, told)
    assert_same(plain, found)
    is_seen = mode.is_native is IS_NATIVE  # which ops there are
    assert summary.steps_recorded == (1 if is_seen else MOST_LOST_PLANS + 1), told
    assert summary.steps_on_plan == 0
    why = OTHER_OPS if is_seen else "its ops differ from step to step: 3 plans could not be followed"
    assert sum("run online: " in each and "ops differ from step to step" in each for each in told) == 1
    (shape,) = summary.shapes
    assert (shape.decision, shape.reason) == ("online", why)
