"""Steps whose ops differ from one to the next are neither recorded nor planned, as soon as that shows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.api.options import PlanOptions
from pooch.autopilot.costs import HostCosts
from pooch.autopilot.differing_ops import DifferingOps, different_ops
from pooch.autopilot.jobs import done
from pooch.autopilot.known import Known
from pooch.autopilot.library import MOST_RECORDED, OTHER_OPS, Library
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.signature import StepKey
from pooch.autopilot.waiting import Request
from pooch.ir import Profile
from pooch.machine import CopySpeed
from pooch.torchtools import watch
from tests.executor.support import assert_same
from tests.toys import blocks

pytestmark = pytest.mark.cpu


def key_of(size: int) -> StepKey:
    return StepKey(((("float32", 1),),), (size,))


class Met:
    """Steps of one family, of which none is planned unless that is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, plans: bool = False) -> None:
        self.asked, self.told = list[StepKey](), list[str]()
        if not plans:
            monkeypatch.setattr(PlanRequests, "ask", lambda _, key, *__: self.asked.append(key))
        monkeypatch.setattr(PlanRequests, "warm_up", lambda _: None)
        self.library = Library(PlanOptions(), self.told.append, HostCosts(CopySpeed("not measured")))
        self.profile: Profile = blocks(4)
        self.step(1, 1)  # the first step of all is not recorded

    def step(self, size: int, ops: int) -> tuple[str, Known]:
        """Run a step that does not fit, and return how."""
        profile, key = self.profile, key_of(size)
        decision, known = self.library.choose(key, profile.persistent_bytes, int(0.9 * profile.peak_bytes))
        if decision == "record":
            self.library.recorded(key, known, profile, 1)
        else:
            self.library.saw_ops(key, known, ops)
        return decision, known


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    return Met(monkeypatch)


def test_where_all_differ_no_more_are_recorded_or_planned(met: Met) -> None:
    assert met.step(1, 2)[0] == "record"
    assert {met.step(1, ops)[0] for ops in (3, 4, 5)} == {"online"}
    assert met.asked
    met.asked.clear()
    for size in range(1, 9):
        decision, known = met.step(size, 10 + size)
        assert decision == "online"
        assert known.reason == OTHER_OPS
    assert not met.asked
    (line,) = [each for each in met.told if "ops differ" in each]
    assert line == "steps like those of 1 run online: their ops differ from step to step, in equal sizes too"


def test_what_moving_takes_in_steps_that_all_differ_is_told_once_for_each_size(met: Met) -> None:
    for ops in range(2, 60):
        size = 1 + ops % 2
        decision, known = met.step(size, ops)
        if decision == "online":
            met.library.ended(key_of(size), known, "online", 100.0, 0, 20.0)
    assert [line for line in met.told if "ops differ" in line]
    assert [line.split(" ")[2] for line in met.told if "leaves and comes back takes 20.0 ms of 100.0 ms" in line] == [
        "1",
        "2",
    ]


def test_a_plan_that_comes_too_late_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Request]()
    monkeypatch.setattr(PlanRequests, "_put", lambda _, request: asked.append(request))
    monkeypatch.setattr(PlanRequests, "warm_up", lambda _: None)
    met = Met(monkeypatch, plans=True)
    for ops in (2, 3, 4, 5):
        met.step(1, ops)
    (request,) = asked
    met.library.requests.arrived(request, done(request.job))
    decision, known = met.step(1, 6)
    assert (decision, known.plan, known.is_pending) == ("online", None, False)
    assert not any(each.startswith("planned") for each in met.told)


def test_as_soon_as_three_in_a_row_repeat_earlier_ones_they_are_planned_again(met: Met) -> None:
    met.step(1, 2)
    for ops in (3, 4, 5):
        met.step(1, ops)
    met.asked.clear()
    for ops in (6, 4, 3, 7, 4, 5, 6):
        assert met.step(1, ops)[1].reason == OTHER_OPS
    assert not met.asked
    assert met.step(1, 4)[1].reason != OTHER_OPS
    assert met.asked
    assert met.step(2, 1)[0] == "record"


def test_two_kinds_of_steps_in_turn_are_no_such_steps(met: Met) -> None:
    decisions = [met.step(1 + number % 2, number % 4)[0] for number in range(20)]
    assert decisions.count("record") == 2
    assert met.asked
    assert not any("ops differ" in each for each in met.told)


def test_nor_are_steps_in_ever_other_sizes(met: Met) -> None:
    decisions = [met.step(1 + number, number)[0] for number in range(20)]
    assert decisions.count("record") == MOST_RECORDED
    assert met.asked


def test_nor_are_those_of_which_nothing_is_seen(met: Met) -> None:
    for _ in range(20):
        met.step(1, 0)
    assert met.asked
    assert not any("ops differ" in each for each in met.told)


def test_steps_that_record_nothing_are_looked_at_until_it_is_known() -> None:
    ops, before = DifferingOps(), different_ops()
    looked_at = 0
    for _ in range(100):
        if ops.looks():
            ops.saw(before, 1)
            looked_at += 1
    assert looked_at == 7


def test_where_they_differ_one_step_in_eight_is_looked_at_for_ever() -> None:
    ops, before, looked_at = DifferingOps(), different_ops(), list[int]()
    for number in range(100):
        if ops.looks():
            ops.saw(before, number)
            looked_at.append(number)
    assert ops.differs
    assert looked_at[:4] == [0, 1, 2, 3]
    assert all(after - earlier == 8 for earlier, after in itertools.pairwise(looked_at[4:]))


def test_where_one_repeats_an_earlier_one_the_next_are_looked_at_too() -> None:
    ops, before = DifferingOps(), different_ops()
    for number in range(4):
        assert ops.looks()
        ops.saw(before, number)
    while not ops.looks():
        pass
    for _ in range(2):
        ops.saw(before, 2)
        assert ops.differs
        assert ops.looks()
    ops.saw(before, 2)
    assert not ops.differs


class Wandering(nn.Module):
    """The data decides which activation each layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, rows: Tensor) -> Tensor:
        for layer, chosen in zip(self.layers, torch.randint(3, (12,)).tolist(), strict=True):
            rows = (torch.tanh, torch.sigmoid, torch.sin)[chosen](layer(rows))
        return rows


def trained(budget: str | None) -> Iterator[Tensor | pooch.Auto]:
    torch.manual_seed(1)
    model = Wandering()
    auto = None if budget is None else pooch.auto(model, budget)
    for _ in range(20):
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        yield loss.detach()
        while auto is not None and auto.is_planning:
            time.sleep(0.02)  # the test's time limit ends it
    if auto is not None:
        auto.remove()
        yield auto


def test_a_model_whose_data_decides_on_its_ops_trains_within_the_budget_and_is_recorded_once() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip("there is no native watch")
    plain = torch.stack(list(trained(None)))
    *losses, auto = trained("2MiB")
    assert_same({"losses": plain}, {"losses": torch.stack(losses)})
    summary = auto.summary()
    assert summary.steps_over_budget == 0
    assert summary.swapped_bytes or summary.recomputed_ops
    assert summary.steps_recorded == 1
    assert summary.steps_left_plan <= 3
    assert "ops differ from step to step" in str(summary)
