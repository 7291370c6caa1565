"""A step that leaves its plan goes on under the online policy: bitwise, within the budget, and the counters say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.autopilot.known import Known
from pooch.autopilot.steps import GovernedStep
from pooch.executor.cursor import FIRST_VALUE
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.executor.table import ActionTable
from pooch.ir import Choice, Profile
from tests.executor.online.support import copies_cost, holding, without_collector
from tests.executor.online.zoo import WIDTH, Cube, rows
from tests.executor.support import all_of, mixed, quick_profile, tight_plan

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]
Change = Callable[["Changing", Tensor], Tensor]


class Changing(nn.Module):
    """Layers, between which a step may do something else than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.change: Change | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 3 and self.change is not None:
                hidden = self.change(self, hidden)
            hidden = Cube.apply(torch.tanh(layer(hidden)))
        return hidden


CHANGES: dict[str, Change] = {
    "an extra op": lambda model, hidden: hidden.sin(),
    "another branch": lambda model, hidden: torch.softmax(model.layers[0](hidden), -1) * hidden.exp(),
    "another shape": lambda model, hidden: hidden[: len(hidden) // 2],
    "in place": lambda model, hidden: hidden.mul_(1) if not hidden.requires_grad else hidden.clone().mul_(2),
    "a second model": lambda model, hidden: model.layers[1](model.layers[0](hidden).relu()),
}


def decided(profile: Profile, choice: Choice | None) -> dict[int, Choice]:
    return mixed(profile) if choice is None else all_of(profile, choice)


@pytest.mark.parametrize("way", ["copied", "replayed"])
@pytest.mark.parametrize("choice", ["swap", "recompute", "keep", None])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_left_of_the_step_is_as_plain(
    name: str, choice: Choice | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_cost(monkeypatch, 1e-9 if way == "copied" else 1e9)
    torch.manual_seed(1)
    model, inputs = Changing(), rows()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    plan = tight_plan(profile, decided(profile, choice))
    model.change = CHANGES[name]

    def step(follow: Callable[[], GovernedStep] | None) -> list[Tensor]:
        model.zero_grad()
        following = None if follow is None else follow()
        if following is not None:
            following.open(_NO_GRAPH.runs)
        loss = model(inputs).square().mean()
        if following is not None:
            following.close_forward()
            assert following.left_plan == following.follows_plan
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    with holding() as evictor, without_collector():
        start_bytes = evictor.live.now()
        evictor.live.reset_peak()
        plain = step(None)
        room_bytes = (evictor.live.peak() - start_bytes) * 6 // 10
        model.zero_grad()
        stats = RunStats()
        evictor.set_budget(evictor.live.now() + room_bytes)
        evictor.begin_step(stats)
        found = step(lambda: GovernedStep.on_plan(evictor, plan, Known(plan=plan, table=ActionTable.of(plan))))
        assert evictor.live.peak() <= evictor.budget_bytes + evictor.missing_bytes
        assert evictor._values == {}
        missing_bytes = evictor.missing_bytes

        model.zero_grad()
        evictor.set_budget(evictor.live.now() + room_bytes)
        evictor.begin_step(RunStats())
        step(lambda: GovernedStep(Step(evictor)))
        online_missing_bytes = evictor.missing_bytes
    assert all(map(torch.equal, plain, found))
    assert stats.mismatches == 1
    assert stats.swapped_out_bytes or stats.recomputed_ops
    assert missing_bytes <= online_missing_bytes


def _with_an_op_beside(model: Changing, hidden: Tensor) -> Tensor:
    model.layers[0].weight.detach().sum()
    return hidden


def test_what_follows_is_watched_and_recorded_as_without_a_plan(
    watched_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if watched_by != "native":
        pytest.skip("a mode passes each op to the step in any case")
    copies_cost(monkeypatch, 1e9)
    torch.manual_seed(1)
    model, inputs = Changing(), rows()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    plan = tight_plan(profile, decided(profile, "recompute"))
    known = Known(plan=plan, table=ActionTable.of(plan))
    passed, steps, before = list[int](), list[Step](), Step.before_op

    def before_op(step: Step, *arguments: Any) -> None:
        passed.append(step.cursor.position)
        steps[:] = [step]
        before(step, *arguments)

    with holding() as evictor, without_collector():
        for change in (None, _with_an_op_beside):  # the first one is followed to its end
            model.change = change
            model.zero_grad()
            evictor.begin_step(RunStats())
            step = GovernedStep.on_plan(evictor, plan, known)
            step.open(_NO_GRAPH.runs)
            monkeypatch.setattr(Step, "before_op", before_op)
            passed.clear()
            loss = model(inputs).square().mean()
            step.close_forward()
            assert step.left_plan is (change is not None)
            after = [position for position in passed if position == max(passed)]
            made = steps.pop().owner.recipes.calls()
            loss.backward()
    assert len(after) <= 2, "the op with which it left, and what makes up for that"
    assert len([call for call in made if min(call.writes) >= FIRST_VALUE]) >= 6, "pressure can have them made again"


class _NoGraph:
    def runs(self) -> None:
        raise AssertionError("nothing is compiled here")


_NO_GRAPH = _NoGraph()


def test_a_planned_step_without_room_for_what_it_keeps_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e-9)
    torch.manual_seed(1)
    model, inputs = Changing(), rows()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    plan = tight_plan(profile, all_of(profile, "keep"))
    model.zero_grad()
    with holding() as evictor, without_collector():
        evictor.live.reset_peak()
        start_bytes = evictor.live.now()
        model(inputs).square().mean().backward()
        room_bytes = (evictor.live.peak() - start_bytes) * 7 // 10
        plain = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        evictor.set_budget(evictor.live.now() + room_bytes)
        evictor.begin_step(RunStats())
        following = GovernedStep.on_plan(evictor, plan, Known(plan=plan, table=ActionTable.of(plan)))
        following.open(_NO_GRAPH.runs)
        loss = model(inputs).square().mean()
        following.close_forward()
        assert not following.left_plan
        loss.backward()
        assert evictor.stats.swapped_out_bytes
        assert evictor.live.peak() <= evictor.budget_bytes + evictor.missing_bytes
    assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))
