"""`--check` blames what is to blame: the plan, an algorithm that is not deterministic, or numbers from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.api.measure import checking
from pooch.api.measure.checking import BitsVerdict, DeterministicCheck, judge
from pooch.api.measure.measuring import measure_training
from pooch.api.measure.training import StepResult, Trained
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.ir import Plan
from pooch.report.training import broken_promise, training_tables
from pooch.workloads import WorkloadFactory

CPU = torch.device("cpu")
USER_FILE = """
import time
import torch
import pooch

print("a line on standard output")

class Waves(torch.nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.scales = torch.nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.noise = noise
        self.rows = torch.linspace(-1, 1, 2**16)

    def forward(self):
        hidden = self.rows
        for scale in self.scales:
            hidden = torch.sin(hidden * scale)
        return hidden.square().mean() * self.noise()

def of_the_clock():
    return time.perf_counter_ns() % 1e6

def careless():
    '''As a kernel with atomics: another order of sums each time, unless it is told otherwise.'''
    return 1.0 if torch.are_deterministic_algorithms_enabled() else of_the_clock()

def without_deterministic():
    torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))
    return of_the_clock()

def built(noise):
    torch.use_deterministic_algorithms(False)  # files that set it have no say while numbers are compared
    model = Waves(noise)
    return pooch.Workload(model, model, torch.optim.SGD(model.parameters(), lr=0.1))

def make_careless():
    return built(careless)

def make_of_the_clock():
    return built(of_the_clock)

def without_room():
    workload = built(careless)

    def forward():
        raise RuntimeError("nothing is left: out of memory")

    return pooch.Workload(workload.model, forward)

def make_without_deterministic():
    return built(without_deterministic)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from pooch.api import profiling
    from pooch.executor.engines import measurement
    from tests.executor.support import LINK

    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    monkeypatch.setattr(measurement, "with_step_shares", lambda link, *measuring: link)
    monkeypatch.setattr(profiling, "with_hook_costs", lambda profile, progress: profile)
    path = tmp_path / "waves.py"
    path.write_text(USER_FILE)
    return path


def checked(path: Path, name: str) -> Any:
    factory = WorkloadFactory(f"{path}:{name}")
    chosen = plan(profile_workload(factory(), repeats=1), "60%", region="step")
    report = measure_training(factory, chosen, steps=2, check=True)
    assert (report.swapped_out_bytes or 0) + (report.recomputed_ops or 0) > 0
    return report


def facts(report: Any) -> str:
    return " ".join(str(text) for column in training_tables(report)[1].columns for text in column.cells)


def test_algorithms_that_are_not_deterministic_are_told_and_the_plan_is_checked_without_them(path: Path) -> None:
    report = checked(path, "make_careless")
    assert (report.bitwise_equal, report.repeatable) == (True, False)
    assert report.compared_deterministically is True
    assert broken_promise(report) is None
    assert "yes, bitwise, under deterministic algorithms" in facts(report)
    assert "two plain trainings differ, first at step 1: loss; algorithms that are not deterministic" in facts(report)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_no_algorithm_explains_is_looked_for_elsewhere(path: Path) -> None:
    report = checked(path, "make_of_the_clock")
    assert (report.bitwise_equal, report.repeatable) == (None, False)
    told = str(broken_promise(report))
    assert "\n" not in told
    assert "two plain trainings differ too, first at step 1: loss" in told
    assert "reads the clock" in told


def test_an_operator_without_a_deterministic_algorithm_is_named(path: Path) -> None:
    report = checked(path, "make_without_deterministic")
    assert report.repeatable is False
    assert "no deterministic implementation: put_" in str(broken_promise(report))


# Who is to blame, from what was compared ------------------------------------------------------------------------------


def trained(loss: str) -> Trained:
    return Trained((StepResult(1.0, {"loss": loss}, 1),), {}, None)


def verdict(
    monkeypatch: pytest.MonkeyPatch, planned: str, again: str, found: DeterministicCheck | None, device: str = "cuda"
) -> tuple[BitsVerdict, int]:
    """Plain training gave "a"; and how often the trainings were compared under deterministic algorithms."""
    asked: list[object] = []

    def check(*given: object) -> DeterministicCheck | None:
        asked.append(given)
        return found

    monkeypatch.setattr(checking, "train_reference", lambda *given: trained(again))
    monkeypatch.setattr(checking, "check_deterministically", check)
    made: Any = SimpleNamespace(type=device)
    factory, chosen = WorkloadFactory("toy"), replace_plan()
    return judge(factory, chosen, trained("a"), trained(planned), made, lambda text: None), len(asked)


def replace_plan() -> Plan:
    from tests.toys import chain

    return plan(chain(3), "100%")


EQUAL = DeterministicCheck(None, True, 0, ())


def test_equal_numbers_need_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(monkeypatch, "a", "b", None) == (BitsVerdict(True, True), 0)


def test_on_a_cpu_a_repeatable_training_leaves_the_plan_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(monkeypatch, "b", "a", EQUAL, "cpu") == (BitsVerdict(False, True, "step 1: loss"), 0)


@pytest.mark.parametrize(
    ("found", "is_told"), [(EQUAL, True), (replace(EQUAL, first_difference="loss"), False), (None, False)]
)
def test_on_a_gpu_another_algorithm_of_a_library_is_told_as_the_cause(
    found: DeterministicCheck | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are not those of plain training all the same: cuDNN had no room for the workspace it had plainly."""
    told, asked = verdict(monkeypatch, "b", "a", found)
    assert (told.bitwise_equal, told.repeatable, told.first_difference, asked) == (False, True, "step 1: loss", 1)
    assert told.difference_cause == (checking.OTHER_ALGORITHM if is_told else None)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (EQUAL, BitsVerdict(True, False, "step 1: loss", checking.ALGORITHMS, compared_deterministically=True)),
        (replace(EQUAL, first_difference="step 2: loss"), BitsVerdict(False, False, "step 2: loss", None, True)),
        (replace(EQUAL, steps_off_plan=1), BitsVerdict(None, False, "step 1: loss", checking.OTHER_OPS)),
        (
            DeterministicCheck("step 1: loss", False, 0, ("a", "b")),
            BitsVerdict(None, False, "step 1: loss", "no deterministic implementation: a, b"),
        ),
        (DeterministicCheck("x", False, 0, ()), BitsVerdict(None, False, "step 1: loss", checking.NOT_ALGORITHMS)),
        (None, BitsVerdict(None, False, "step 1: loss", checking.UNKNOWN)),
    ],
)
def test_of_a_training_that_is_not_repeatable_deterministic_algorithms_decide(
    found: DeterministicCheck | None, expected: BitsVerdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict(monkeypatch, "b", "c", found) == (expected, 1)


def test_a_process_that_cannot_compare_is_told(path: Path) -> None:
    told: list[str] = []
    factory = WorkloadFactory(f"{path}:no_such_function")
    matching = plan(profile_workload(WorkloadFactory(f"{path}:make_careless")()), "100%")
    assert checking.check_deterministically(factory, replace_plan(), 1, CPU, told.append) is None
    assert any("no_such_function" in text for text in told)
    told.clear()
    assert (
        checking.check_deterministically(WorkloadFactory(f"{path}:without_room"), matching, 1, CPU, told.append) is None
    )
    assert told[-1].endswith("nothing is left: out of memory")
