"""The benchmark of models of many small ops: its parts run on a tiny net, and its tables say what the samples say."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks import watched_models, watched_rows
from benchmarks.watched_nets import LARGEST, NETS, Net, Trainee
from pooch.workloads import Workload


def tiny() -> Trainee:
    """A few layers on batches whose number of rows depends on the step."""
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*parts)
    batch: list[Tensor] = []

    def draw(number: int) -> None:
        rows = 512 if number % 2 else 256
        batch[:] = [torch.randn(rows, 32, generator=torch.Generator().manual_seed(abs(number)))]

    draw(LARGEST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainee(Workload(model, lambda: mse_loss(model(batch[0]), batch[0]), optimizer), draw)


TINY = Net("tiny", "nothing", tiny)


@pytest.mark.slow
def test_a_net_is_trained_under_auto_and_under_a_plan_with_the_same_bits() -> None:
    found = watched_models.measure(TINY, 0.6, steps=3, turns=1)
    (auto,), (plan,) = watched_rows.auto_rows([found]), watched_rows.plan_rows([found])
    assert auto["same bits"] == plan["same bits"] == "yes"
    assert (auto["steps over it"], plan["off plan"]) == (0, 0)
    kinds = [sample["kind"] for sample in found["auto"]["samples"][:4]]
    assert kinds == ["auto", "plain", "plain", "auto"]


def sample(turn: int, kind: str, ms: float, mode: str = "") -> dict[str, Any]:
    times = {"wall_ms": ms, "cpu_ms": 2 * ms, "thread_ms": ms}
    held = {"mode": mode, "predicted": 1.25 if mode == "plan" else None}
    return {"turn": turn, "kind": kind, **times, **(held if kind == "auto" else {}), "same_bits": turn != 3}


def result() -> dict[str, Any]:
    steps = [(1, 30.0, "online"), (2, 40.0, "recorded"), (3, 15.0, "plan"), (4, 20.0, "plan"), (5, 16.0, "plan")]
    samples = [
        each for turn, ms, mode in steps for each in (sample(turn, "plain", 10.0), sample(turn, "auto", ms, mode))
    ]
    counted = {"steps_in_core": 0, "steps_left_plan": 0, "steps_over_budget": 0, "budget_bytes": 200, "peak_bytes": 199}
    times = {"ms_on_plan": 51.0, "plain_ms_on_plan": 34.0}
    return {"model": "made up", "plain_peak_bytes": 2**20, "auto": {**counted, **times, "samples": samples}}


def test_ratios_are_those_of_steps_of_the_same_turn_and_of_steps_on_plan() -> None:
    (row,) = watched_rows.auto_rows([result()])
    assert row["first steps over plain"] == "3.0 4.0 1.5 2.0 1.6"
    assert row["on plan"] == "3 of 5, from 3 on"
    assert str(row["on plan, over plain"]).startswith("1.60 ")
    assert (row["predicted"], row["as auto tells"], row["peak of budget"]) == ("1.25", "1.50", "99.5%")
    assert row["same bits"] == "NO"


def test_what_is_missing_or_refused_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "exotic", Net("exotic", "nothing", tiny, "no_such_package"))
    missing = watched_models.in_child("exotic", argparse.Namespace())
    refused = {**result(), "auto": {"failed": "UsageError: no"}, "plan": {"failed": "InfeasibleBudget: too small"}}
    rows = watched_rows.auto_rows([missing, refused, result()])
    assert [row["plain step"] for row in rows[:2]] == ["not installed: no_such_package", "UsageError: no"]
    assert list(rows[0]) == list(rows[2])
    assert watched_rows.plan_rows([refused]) == [{"model": "made up", "budget": "InfeasibleBudget: too small"}]


@pytest.mark.parametrize("name", NETS)
def test_two_trainings_of_a_net_see_the_same_batches(name: str) -> None:
    net = NETS[name]
    if net.needs and importlib.util.find_spec(net.needs) is None:
        pytest.skip(f"needs {net.needs}")
    losses = []
    for _ in range(2):
        trainee = net.build()
        if trainee.draw is not None:
            trainee.draw(3)
        with torch.no_grad():
            torch.manual_seed(0)
            losses.append(trainee.workload.forward())
    assert losses[0].isfinite()
    assert torch.equal(*losses)
