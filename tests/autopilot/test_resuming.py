"""Plans that are kept beside a checkpoint, and training that resumes with them."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from pooch.autopilot import Auto
from pooch.autopilot.cache import Seat
from pooch.autopilot.summary import AutoSummary
from pooch.errors import UsageError
from pooch.torchtools.memory_trace import live_bytes
from tests.autopilot.test_ranks import made, on_ranks
from tests.executor.online.support import run_plainly
from tests.executor.online.zoo import Cube, Layers, rows, trained
from tests.executor.support import assert_same

pytestmark = pytest.mark.cpu
STEPS, RESUMED_AT = 8, 5


@pytest.fixture(autouse=True)
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.autopilot.autopilot.PLANNING_TIME_LIMIT_S", 1.0)  # a plan of any quality will do


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return Layers(lambda hidden: Cube.apply(torch.tanh(hidden)), depth=6)


def train(model: nn.Module, steps: range, auto: Auto | None = None) -> None:
    for number in steps:
        torch.manual_seed(number)
        model(rows(512)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        while auto is not None and auto.is_planning:
            time.sleep(0.05)  # the test's time limit ends it


def interrupted(directory: Path) -> int:
    """Train under a budget, which is returned, and stop; the directory then has a checkpoint, and the plans."""
    step_bytes = run_plainly(lambda: trained(a_model(), rows(512))).peak_bytes
    model = a_model()
    gc.collect()
    budget = live_bytes(torch.device("cpu")) + int(0.6 * step_bytes)
    with Auto([model], budget, tell=lambda _: None) as auto:
        train(model, range(RESUMED_AT), auto)
        auto.save_plans(directory)
        assert auto.summary().steps_recorded
        assert auto.plans
    torch.save(model.state_dict(), directory / "model.pt")
    return budget


def resumed(budget: int, directory: Path, **options: object) -> tuple[dict[str, Tensor], AutoSummary]:
    model = a_model()
    model.load_state_dict(torch.load(directory / "model.pt"))
    gc.collect()
    with Auto([model], budget, cache=directory, tell=lambda _: None, **options) as auto:  # type: ignore[arg-type]
        train(model, range(RESUMED_AT, STEPS))
        return model.state_dict(), auto.summary()


def test_training_resumes_with_the_plans_that_were_kept_beside_its_checkpoint(tmp_path: Path) -> None:
    budget = interrupted(tmp_path)
    found, summary = resumed(budget, tmp_path)
    plain = a_model()
    train(plain, range(STEPS))
    assert_same(plain.state_dict(), found)
    assert (summary.steps_on_plan, summary.steps_recorded) == (STEPS - RESUMED_AT, 0)
    assert summary.steps_over_budget == 0
    assert [shape.origin for shape in summary.shapes] == ["cached"]


def test_plans_that_do_not_belong_to_the_training_are_not_taken(tmp_path: Path) -> None:
    budget = interrupted(tmp_path)
    _, other_budget = resumed(budget + 4096, tmp_path)
    _, smaller_tier = resumed(budget, tmp_path, host_budget=4096)
    for file in tmp_path.rglob("plan.json"):
        file.write_text("{")
    _, broken = resumed(budget, tmp_path)
    for summary in (other_budget, smaller_tier, broken):
        assert summary.steps_recorded
        assert not summary.steps_on_plan
    assert other_budget.steps_over_budget == broken.steps_over_budget == 0


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Auto([a_model()], "1GiB", tell=lambda _: None) as auto, pytest.raises(UsageError, match="cannot be kept in"):
        auto.save_plans(tmp_path / "file" / "plans")


def test_ranks_keep_their_plans_apart() -> None:
    assert Seat().folder == Path()
    assert Seat(2, 4).folder == Path("4-ranks", "rank-2")


def _trained(rank: int, directory: str, is_first: bool, others: str) -> None:
    model, told = made("sharded"), []
    before = live_bytes(torch.device("cpu"))
    with Auto([model], before + 2_600_000, cache=None if is_first else directory, tell=told.append) as auto:
        for number in range(6 if is_first else 3):
            torch.manual_seed(number)
            model(torch.randn(1024, 32), True).square().mean().backward()
            model.zero_grad()
            while number > 1 and auto.is_planning:
                time.sleep(0.05)
        summary = auto.summary()
        if is_first:
            assert summary.steps_on_plan, str(summary)
            auto.save_plans(directory)
    assert summary.steps_over_budget == 0
    if not is_first:
        # The first step of a sharded model arranges what later steps have, and so leaves the plan.
        assert summary.steps_on_plan >= 2 if not others else not summary.steps_on_plan, str(summary)
        assert bool(summary.steps_recorded) == bool(others), str(summary)
    lines = [line for line in told if "are for" in line]
    assert lines == ([f"the plans in {directory} are for {others}"] if others and rank == 0 else [])
    distributed.barrier()


def test_as_many_ranks_resume_with_their_plans_and_other_numbers_plan_again(tmp_path: Path) -> None:
    plans = str(tmp_path / "plans")
    for turn, (ranks, is_first, others) in enumerate(
        [(2, True, ""), (2, False, ""), (1, False, "2 ranks: new ones are made for this process")]
    ):
        directory = tmp_path / str(turn)
        directory.mkdir()
        on_ranks(_trained, directory, plans, is_first, others, ranks=ranks)
