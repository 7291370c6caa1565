"""Training and measuring: differences are seen, turns are timed, limits are physical, broken promises are repaired."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.table import Table

from pooch.api.measure import measuring
from pooch.api.measure.arena_training import FIRST_STEPS, served, train
from pooch.api.measure.hard_limit import LimitedJob, train_limited
from pooch.api.measure.measuring import measure_training, optimize
from pooch.api.measure.timing import Timing, time_in_turns
from pooch.api.measure.training import StepResult, Trained, first_difference, train_steps
from pooch.api.measure.training_report import TrainingReport, report_of
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.api.wire import WIRE
from pooch.errors import PoochError
from pooch.ir import Region
from pooch.report.fitting import FittedTable
from pooch.report.training import broken_promise, training_record, training_tables
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.standing_aside import _HERE
from pooch.workloads import Workload, WorkloadFactory

WIDE = """
import torch
import pooch

class Waves(torch.nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.scales = torch.nn.Parameter(torch.linspace(0.5, 1.5, layers))
        self.register_buffer("steps", torch.zeros(()))
        self.start = torch.nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self):
        self.steps += 1
        hidden = self.start * 2
        for scale in self.scales:
            hidden = torch.sin(hidden * scale)
        return hidden.square().mean()

def make(layers=6, width=4 * 2**20):
    torch.manual_seed(0)
    model = Waves(layers, width)
    return pooch.Workload(model, model, torch.optim.SGD(model.parameters(), lr=0.1))

def broken():
    raise ValueError("no such data")
"""


@pytest.fixture
def wide(tmp_path: Path) -> str:
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    return f"{path}:make"


def quiet(text: str) -> None:
    """Nobody is told."""


def test_two_trainings_of_the_same_workload_are_bitwise_equal(wide: str) -> None:
    factory = WorkloadFactory(wide, settings={"width": 1024})
    first, second = (train_steps(factory(), None, 2, quiet) for _ in range(2))
    assert first_difference(first, second) is None


def test_a_single_changed_bit_is_named(wide: str) -> None:
    factory = WorkloadFactory(wide, settings={"width": 1024})
    plain = train_steps(factory(), None, 2, quiet)
    changed = factory()
    with torch.no_grad():
        changed.model.start[7] += 1e-7
    difference = first_difference(plain, train_steps(changed, None, 2, quiet))
    assert difference is not None
    assert difference.startswith("step 1: ")


def test_a_changed_buffer_alone_is_named(wide: str) -> None:
    factory = WorkloadFactory(wide, settings={"width": 1024})
    plain = train_steps(factory(), None, 1, quiet)
    changed = factory()
    changed.model.steps += 1  # type: ignore[operator]
    assert first_difference(plain, train_steps(changed, None, 1, quiet)) == "after training: buffer steps"


def test_one_more_random_number_is_named(wide: str) -> None:
    """Loss, gradients and weights are the same, and the next step would not be."""
    factory = WorkloadFactory(wide, settings={"width": 1024})
    plain = train_steps(factory(), None, 1, quiet)
    drawing = factory()
    drawing.model.register_forward_hook(lambda *_: torch.rand(1) < -1 or None)
    assert first_difference(plain, train_steps(drawing, None, 1, quiet)) == "after training: random state"


def test_trainings_begin_with_the_same_random_state(wide: str) -> None:
    """Whatever was drawn before: else dropout alone would make planned steps differ from plain ones."""

    def train() -> Trained:
        workload = WorkloadFactory(wide, settings={"width": 1024})()
        torch.seed()
        return train_steps(replace(workload, forward=lambda: workload.model() * torch.rand(())), None, 2, quiet)

    assert first_difference(train(), train()) is None


@pytest.mark.parametrize("region", ["model", "step"])
def test_plain_and_planned_steps_take_turns_and_the_plan_is_off_in_between(
    region: Region, wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the steps move: each takes a second more than the one before it."""
    workload = WorkloadFactory(wide, settings={"width": 2**16})()
    chosen = plan(profile_workload(workload, repeats=1), "min", policy="recompute_all", region=region)  # on any machine
    assert set(chosen.decisions.values()) != {"keep"}
    watched: list[bool] = []
    now_s = [100.0]
    real = type(workload.model).forward

    def forward(model: torch.nn.Module) -> torch.Tensor:
        watched.append(bool(_HERE.modes))
        now_s[0] += len(watched)
        return real(model)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(workload.model), "forward", forward)
    monkeypatch.setattr("pooch.api.measure.timing.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    timing = time_in_turns(workload, chosen, 2, quiet)
    # THEN who goes first changes with every turn, and the plan is at work in the planned steps alone
    assert watched == [False, True, True, False, False, True, True, False]
    # AND the first two turns were for warming up, in which replays are compared in full
    assert timing.plain_samples_ms == (5000.0, 8000.0)
    assert timing.planned_samples_ms == (6000.0, 7000.0)
    assert (timing.plain_ms, timing.planned_ms) == (6500.0, 6500.0)


def test_a_peak_over_the_prediction_is_told_as_it_was_measured(wide: str) -> None:
    """The step takes memory that the profile did not see, by no op that would show it."""
    workload = WorkloadFactory(wide, settings={"width": 2**18})()
    chosen = plan(profile_workload(workload, repeats=1), "60%", region="step")
    more_bytes = chosen.budget_bytes
    ballast: list[torch.UntypedStorage] = []

    def forward() -> torch.Tensor:
        ballast[:] = [torch.UntypedStorage(more_bytes)]
        return workload.model()  # type: ignore[no-any-return]

    trained = train_steps(replace(workload, forward=forward), chosen, 1, quiet)
    report = report_of(chosen, trained, Timing((1.0,), (1.0,)), None, {})
    assert trained.stats is not None
    assert trained.stats.mismatches == 0
    assert trained.stats.peak_bytes == trained.peak_bytes == report.measured_peak_bytes
    assert report.measured_peak_bytes > chosen.predicted_peak_bytes + 0.9 * more_bytes
    assert report.within_budget is False
    assert report.peak_error is not None
    assert report.peak_error < 0


@pytest.mark.slow
def test_under_a_hard_limit_plain_training_dies_and_planned_training_goes_through(wide: str) -> None:
    factory = WorkloadFactory(wide, settings={"layers": 12, "width": 8 * 2**20})
    chosen = plan(profile_workload(factory(), repeats=1), "50%", region="step")
    plain = train_limited(LimitedJob(factory, None, chosen.budget_bytes, 1), quiet)
    assert not plain.survived
    assert "memory" in plain.message
    planned = train_limited(LimitedJob(factory, chosen, chosen.budget_bytes, 1), quiet)
    assert planned.survived, planned.message
    assert len(planned.losses) == 1
    on_arena = train_limited(LimitedJob(factory, chosen, chosen.budget_bytes, 1, on_arena=True), quiet)
    assert on_arena.survived, on_arena.message
    assert on_arena.arena is not None
    assert on_arena.arena.startswith("serving")
    assert len(on_arena.losses) == FIRST_STEPS  # all but one, and the step that was asked for
    tight = train_limited(LimitedJob(factory, chosen, chosen.budget_bytes // 2, 1, on_arena=True), quiet)
    assert (tight.survived, tight.arena) == (False, None)
    assert tight.message.startswith("memory ran out")


def test_what_was_trained_on_an_arena_in_another_process_can_be_compared_here(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pooch.api.arenas.install_cuda_arena", lambda: None)
    factory = WorkloadFactory(wide, settings={"layers": 4, "width": 2**16})
    chosen = plan(profile_workload(factory(), repeats=1), "70%", region="step")
    told = served(factory, chosen, 1, "first", quiet)
    parts, outcome = WIRE.made(json.loads(json.dumps(WIRE.plain(told))))
    assert (parts, outcome) == told
    alone, none = train(factory, chosen, 1, quiet, on_arena=False, verify="first")
    assert [*map(first_difference, alone, parts)] == [None, None]
    assert (none.arena, none.arena_bytes) == ("none", 0)
    assert outcome.arena_bytes > 0, outcome.arena


def test_a_limited_process_that_fails_for_another_reason_says_so(wide: str) -> None:
    factory = WorkloadFactory(wide.replace(":make", ":broken"))
    with pytest.raises(PoochError, match="no such data"):
        train_limited(LimitedJob(factory, None, 10**9, 1), quiet)


def test_a_peak_over_the_budget_is_repaired_with_a_tighter_plan(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measured peak is made to lie 8 MiB over the budget; the second plan has to be that much smaller."""
    real, told = measuring.report_of, []

    def lying(chosen: Any, *measured: Any) -> TrainingReport:
        report = real(chosen, *measured)
        told.append(chosen.predicted_peak_bytes)
        if len(told) > 1:
            return report
        return replace(report, measured_peak_bytes=chosen.budget_bytes + 8 * 2**20)

    monkeypatch.setattr(measuring, "report_of", lying)
    result = optimize(WorkloadFactory(wide), "60%", steps=1)
    assert result.training.repairs == 1
    assert told[1] <= result.plan.budget_bytes - 8 * 2**20
    assert result.training.measured_peak_bytes <= result.plan.budget_bytes


class RoundingMeter(MemoryMeter):
    """Of an allocator that rounds blocks up, so that each peak lies over the budget by 900 bytes."""

    budget_bytes = 48 * 2**20
    explained_bytes = 900

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        assert self.peak_bytes <= self.budget_bytes
        self.peak_bytes, self.rounding_bytes = self.budget_bytes + 900, self.explained_bytes


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("is_explained", [True, False])
def test_optimize_plans_again_for_what_tensors_take_and_not_for_what_the_allocator_rounds_up(
    wide: str, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundingMeter, "explained_bytes", 900 if is_explained else 899)
    monkeypatch.setattr("pooch.executor.run.MemoryMeter", RoundingMeter)
    factory = WorkloadFactory(wide, settings={"width": 2**20})
    report = optimize(factory, RoundingMeter.budget_bytes, steps=1).training
    assert report.excess_bytes == (0 if is_explained else 1)
    assert report.repairs == (0 if is_explained else measuring.MOST_REPAIRS)
    assert report.within_budget is is_explained
    assert (broken_promise(report) is None) is is_explained
    measured, facts = training_tables(report)
    assert isinstance(measured, FittedTable)
    assert isinstance(facts, Table)
    shown = [str(text) for table in (measured.whole(), facts) for text in table.columns[1].cells]
    assert any("except for 900 B by which the allocator rounds" in str(text) for text in shown) is is_explained


def test_a_peak_that_no_tighter_plan_helps_is_reported_and_not_an_error_of_planning(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measured peak is made to lie so far over the budget that there is no plan for that much less."""
    real = measuring.report_of

    def lying(chosen: Any, *measured: Any) -> TrainingReport:
        return replace(real(chosen, *measured), measured_peak_bytes=2 * chosen.budget_bytes, within_budget=False)

    monkeypatch.setattr(measuring, "report_of", lying)
    report = optimize(WorkloadFactory(wide, settings={"width": 2**18}), "60%", steps=1).training
    assert report.repairs == 0
    assert "is over the budget" in str(broken_promise(report))


def test_optimize_keeps_the_promise_on_a_workload_of_the_users(wide: str) -> None:
    result = optimize(WorkloadFactory(wide), "60%", steps=2, check=True)
    assert result.training.bitwise_equal, result.training.first_difference
    assert result.training.within_budget
    assert result.training.repairs == 0
    moved = (result.training.swapped_out_bytes or 0) + (result.training.recomputed_ops or 0)
    assert moved > 0
    assert isinstance(WorkloadFactory(wide)(), Workload)


UNSEEDED = """
import random
import numpy
import torch
import pooch

SCALE = random.random()  # drawn when the file is imported

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("shift", torch.from_numpy(numpy.random.rand(64)).float())

    def forward(self, rows):
        for layer in self.layers:
            rows = torch.nn.functional.dropout(torch.tanh(layer(rows)), 0.1) + self.shift
        return (rows * SCALE * random.random() * numpy.random.rand()).square().mean()

def make():
    model, data = Noisy(), torch.randn(2048, 64)
    return pooch.Workload(model, lambda: model(data), torch.optim.SGD(model.parameters(), lr=0.1))

def of_the_clock():
    import time
    model, data = Noisy(), torch.randn(2048, 64)
    return pooch.Workload(model, lambda: model(data) * (time.perf_counter_ns() % 1e6))
"""


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of transfers and hooks are not what these tests are about, and take most of a profile's time."""
    from pooch.api import profiling
    from pooch.executor.engines import measurement
    from tests.executor.support import LINK

    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    monkeypatch.setattr(measurement, "with_step_shares", lambda link, *measuring: link)
    monkeypatch.setattr(profiling, "with_hook_costs", lambda profile, progress: profile)


@pytest.fixture
def unseeded(tmp_path: Path) -> str:
    path = tmp_path / "unseeded.py"
    path.write_text(UNSEEDED)
    return f"{path}:make"


def test_a_file_of_the_users_without_a_seed_is_built_and_trained_alike_each_time(unseeded: str) -> None:
    first, second = (train_steps(WorkloadFactory(unseeded)(), None, 2, quiet) for _ in range(2))
    assert first_difference(first, second) is None
    assert first.steps[0].loss != first.steps[1].loss


@pytest.mark.usefixtures("known_costs")
def test_check_finds_the_same_numbers_for_a_file_without_a_seed(unseeded: str) -> None:
    factory = WorkloadFactory(unseeded)
    chosen = plan(profile_workload(factory(), repeats=1), "60%", region="step")
    report = measure_training(factory, chosen, steps=2, check=True)
    assert (report.bitwise_equal, report.repeatable) == (True, True), report.first_difference
    assert (report.swapped_out_bytes or 0) + (report.recomputed_ops or 0) > 0
    assert broken_promise(report) is None


@pytest.mark.usefixtures("known_costs")
def test_a_training_that_is_not_repeatable_is_not_blamed_on_the_plan(unseeded: str) -> None:
    factory = WorkloadFactory(unseeded.replace(":make", ":of_the_clock"))
    chosen = plan(profile_workload(factory(), repeats=1), "60%", region="step")
    report = measure_training(factory, chosen, steps=1, check=True)
    assert (report.bitwise_equal, report.repeatable) == (None, False)
    assert report.first_difference == "step 1: loss"
    assert training_record(report)["kept"] is False
    assert "two plain trainings differ too, first at step 1: loss" in str(broken_promise(report))


@pytest.mark.usefixtures("known_costs")
def test_a_plan_that_changes_numbers_is_told_from_a_training_that_does(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = WorkloadFactory(wide, settings={"width": 2**18})
    chosen = plan(profile_workload(factory(), repeats=1), "60%", region="step")
    real = train_steps

    def wrong(workload: Workload, given: Any, *others: Any) -> Trained:
        if given is not None:
            with torch.no_grad():
                workload.model.start[7] += 1e-3
        return real(workload, given, *others)

    monkeypatch.setattr(measuring, "train_steps", wrong)
    report = measure_training(factory, chosen, steps=1, check=True)
    assert (report.bitwise_equal, report.repeatable) == (False, True)
    assert "the numbers are not those of plain training" in str(broken_promise(report))


def test_the_first_difference_is_the_first_in_the_order_of_the_step() -> None:
    names = [f"gradient of layer{number}" for number in range(30)]
    same = {"loss": "a"} | dict.fromkeys(names, "a")
    other = {"loss": "a"} | dict.fromkeys(names, "b")
    assert first_difference(trained([same]), trained([other])) == "step 1: gradient of layer0"
    assert first_difference(trained([same]), trained([other | {"loss": "b"}])) == "step 1: loss"
    assert first_difference(trained([same, other]), trained([same, same])) == "step 2: gradient of layer0"
    longer = trained([same | {"gradient of new": "a"}])
    assert first_difference(trained([same]), longer) == "step 1: gradient of new"
    final = {"parameter a": "1", "parameter b": "1", "buffer a": "1", "random state": "1"}
    ends = trained([same], final), trained([same], dict.fromkeys(final, "2"))
    assert first_difference(*ends) == "after training: parameter a"


def trained(steps: list[dict[str, str]], final: dict[str, str] | None = None) -> Trained:
    return Trained(tuple(StepResult(0.0, digests, 1) for digests in steps), final or {}, None)


@pytest.mark.parametrize("generator", ["Python", "NumPy"])
def test_random_numbers_beside_pytorchs_are_compared_too(wide: str, generator: str) -> None:
    import random

    import numpy

    factory = WorkloadFactory(wide, settings={"width": 1024})
    plain = train_steps(factory(), None, 1, quiet)
    changed = factory()
    real = changed.forward

    def forward() -> torch.Tensor:
        random.random() if generator == "Python" else numpy.random.rand()  # noqa: NPY002
        return real()

    other = train_steps(replace(changed, forward=forward), None, 1, quiet)
    assert first_difference(plain, other) == f"after training: random state of {generator}"
