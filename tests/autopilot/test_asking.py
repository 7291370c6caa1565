"""Where nothing can leave any more, allocations over the budget ask for no room."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pooch.autopilot import Auto
from pooch.autopilot.requests import PlanRequests
from pooch.executor.evictor import Evictor
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.online.zoo import Cube, Layers, rows

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run online, and are recorded."""
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda *_: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were missing each time that room was asked for."""
    found: list[int] = []
    make_room = Evictor.make_room

    def counted(evictor: Evictor, missing_bytes: int) -> None:
        found.append(missing_bytes)
        make_room(evictor, missing_bytes)

    monkeypatch.setattr(Evictor, "make_room", counted)
    return found


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: Cube.apply(torch.tanh(hidden)), depth=5)


def trained(model: nn.Module, read: Callable[[Tensor], object] = lambda _: None) -> None:
    loss = model(rows(256)).square().mean()
    read(loss)
    loss.backward()
    model.zero_grad()


def test_the_plain_step_of_another_model_asks_once(asked: list[int]) -> None:
    governed, other = a_model(), a_model()
    gc.collect()
    with Auto([governed], live_bytes(CPU) + 700_000, tell=lambda _: None) as auto:
        for _ in range(3):
            trained(governed)
            assert len(asked) > 1, "room is made for the governed model"
            asked.clear()
            trained(other)
            assert len(asked) == 1, "then nothing is there that could leave"
            asked.clear()
        assert auto.summary().steps_over_budget == 0


def test_a_step_that_nothing_can_leave_tells_how_much_was_missing(asked: list[int]) -> None:
    """It is counted on while nobody is asked."""
    governed, other = a_model(), a_model()
    gc.collect()
    with Auto([governed], live_bytes(CPU) + 700_000, tell=lambda _: None) as auto:
        trained(governed)
        evictor = auto._driver.evictor
        evictor.begin_step(evictor.stats)
        asked.clear()
        trained(other)
        assert len(asked) == 1
        assert evictor.missing_bytes == evictor.live.peak() - evictor.budget_bytes > asked[0]


def test_what_a_step_holds_leaves_before_its_backward_pass(asked: list[int]) -> None:
    """Once there is something again that can leave, room is asked for as ever."""
    governed, other = a_model(), a_model()
    gc.collect()
    with Auto([governed], live_bytes(CPU) + 700_000, tell=lambda _: None) as auto:
        trained(governed)
        trained(other)
        loss = governed(rows(256)).square().mean()
        asked.clear()
        taken = [torch.empty(20_000) for _ in range(4)]
        assert len(asked) > 1
        evictor = auto._driver.evictor
        assert evictor.live.now() <= evictor.budget_bytes
        del taken
        loss.backward()
