"""From a recorded step to a plan that is followed, with the worker, its process and all else as users have them."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor, nn

from pooch.autopilot import Auto
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.online.support import run_plainly
from tests.executor.online.zoo import Cube, Layers, rows, trained
from tests.executor.support import assert_same

pytestmark = pytest.mark.cpu
ROWS, STEPS = 512, 8
Found = dict[str, Tensor]


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: Cube.apply(torch.tanh(hidden)), depth=6)


def train(model: nn.Module, auto: Auto | None) -> Found:
    """Train on batches of two sizes in turn; between steps wait until nothing more is being planned."""
    torch.manual_seed(2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for number in range(STEPS):
        loss = model(rows(ROWS if number % 2 == 0 else ROWS - 100)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        while auto is not None and auto.is_planning:
            time.sleep(0.05)  # the test's time limit ends it
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {"losses": torch.stack(losses), "random state": torch.get_rng_state()}


def test_a_step_is_recorded_and_planned_beside_training_and_the_plan_is_followed() -> None:
    plain = train(a_model(), None)
    step_bytes = run_plainly(lambda: trained(a_model(), rows(ROWS))).peak_bytes
    model, told = a_model(), []
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())  # gradients are in the step's peak
    gc.collect()
    with Auto([model], live_bytes(torch.device("cpu")) + state_bytes + int(0.6 * step_bytes), tell=told.append) as auto:
        found = train(model, auto)
        plans = auto.plans
        status = auto.status()
    assert_same(plain, found)
    summary = auto.summary()
    assert summary.steps_over_budget == 0
    assert summary.steps_left_plan == 0
    assert len(plans) == 2
    assert all(plan.schedule.actions for plan in plans.values())
    # The first step warms up, then each size is recorded once, and follows its plan as soon as that fits what is live.
    assert summary.steps_recorded == 2
    assert summary.steps_on_plan >= STEPS // 2
    assert summary.steps_on_plan + summary.steps_online == STEPS
    assert summary.swapped_bytes or summary.recomputed_ops
    assert (status.steps, status.mode) == (STEPS, "plan")
    predicted = [known.told for _, known in auto._driver.library._known.items() if known.told is not None]
    for each, plan in zip(predicted, plans.values(), strict=True):
        assert each.plain_ms <= plan.in_core_step_ms, "other steps show it if recording made the recorded one slower"
        lost_ms = plan.predicted_step_ms - plan.in_core_step_ms
        assert each.step_ms - each.plain_ms == pytest.approx(lost_ms)
    assert all(each.optimizer_ms > 0 for each in predicted), "a step of the loop has that of the optimizer in it"
    slowdowns = [(each.step_ms + each.optimizer_ms) / (each.plain_ms + each.optimizer_ms) for each in predicted]
    assert status.slowdown in [round(slowdown, 4) for slowdown in slowdowns]
    assert status.as_numbers()["pooch/on_plan"] == 1
    assert [line for line in told if line.startswith("planned for steps of")]
