"""Models that are found as they are called."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from pooch.autopilot import finding
from pooch.autopilot.finding import ModelFinder
from pooch.ground.units import format_bytes
from tests.live_before import live_before

pytestmark = pytest.mark.cpu
HEAD_START_S = 0.2  # for the thread that should wait; a right one is not kept from anything by it


def trained(model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()


def test_models_that_two_threads_call_for_the_first_time_at_once_get_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of them had each other's parameters leave, and the second one ended the step with an error."""
    begun, second_begun, made, errors = threading.Event(), threading.Event(), list[Any](), list[BaseException]()
    real = finding.auto

    def slowly(*args: Any, **kwargs: Any) -> Any:
        (second_begun if begun.is_set() else begun).set()
        second_begun.wait(HEAD_START_S)
        made.append(real(*args, **kwargs))
        return made[-1]

    def train(model: nn.Module) -> None:
        try:
            trained(model)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    monkeypatch.setattr(finding, "auto", slowly)
    models = [nn.Linear(8, 8) for _ in range(2)]
    finder = ModelFinder(live_before() + 2**20, tell=lambda _: None)
    finder.start()
    try:
        first, second = (threading.Thread(target=train, args=(model,)) for model in models)
        first.start()
        assert begun.wait(60)
        second.start()
        for thread in (first, second):
            thread.join(60)
        assert not errors
        assert made == [finder.auto]
        assert not finder.refusals
        for model in models:
            trained(model)
        assert made[0].summary().steps >= 3
    finally:
        finder.stop()
        made.clear()
        gc.collect()


def test_a_program_that_ends_while_a_thread_trains_is_summed_up() -> None:
    begun, may_end = threading.Event(), threading.Event()
    model = nn.Linear(8, 8)

    def train() -> None:
        trained(model)
        outputs = model(torch.randn(4, 8))
        begun.set()
        may_end.wait(60)
        outputs.sum().backward()

    finder = ModelFinder(live_before() + 2**20, tell=lambda _: None)
    finder.start()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert begun.wait(60)
        summary = finder.stop()
        assert summary is not None
        assert summary.steps == 1
    finally:
        may_end.set()
        thread.join(60)
        assert finder.auto is not None
        finder.auto.remove()


@pytest.mark.parametrize("rows", [4, 4000])
def test_what_was_live_before_the_first_step_is_part_of_the_verdict(rows: int) -> None:
    """An evaluation that nobody governs, and whose tensors are gone as training begins, passed the budget unseen."""
    told: list[str] = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 256))
    budget_bytes = live_before() + 2 * 2**20
    finder = ModelFinder(budget_bytes, tell=told.append)
    finder.start()
    try:
        with torch.no_grad():
            net(torch.randn(rows, 8))  # of 4,000 rows, the result alone takes 3.9 MiB
        for _ in range(3):
            trained(net)
    finally:
        summary = finder.stop()
    assert summary is not None
    verdict = str(summary).splitlines()[0].removeprefix("pooch: ")
    assert verdict.startswith("Budget held:"), verdict
    assert (f"but up to {format_bytes(summary.before_peak_bytes)} were live before the first" in verdict) == (rows > 4)
    assert (summary.before_peak_bytes > budget_bytes) == (rows > 4)
