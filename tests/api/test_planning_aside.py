"""Planning in a process that ends: the same plans, errors, progress and interruptions, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import pooch
from pooch.api import planning, planning_aside
from pooch.api.children import Child
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Choice, Plan
from tests.api import child_work
from tests.children import child_environment
from tests.toys import FAST_LINK, blocks, in_full


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every plan is made aside; the child processes that were started."""
    started: list[int] = []

    class Noted(Child):
        def start(self) -> subprocess.Popen[bytes]:
            process = super().start()
            started.append(process.pid)
            return process

    monkeypatch.setattr(planning, "is_worthwhile", lambda profile: True)
    monkeypatch.setattr(planning_aside, "Child", Noted)
    return started


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A child process that tells its process number, then waits for Ctrl-C."""
    child_work.let_children_do_it(monkeypatch)
    with Child("wait", imports_as_here=True) as child:
        yield child


def is_running(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def facts(plan: Plan) -> str:
    """All of a plan except the time that planning took; as text, in which numbers that are nan are equal."""
    return in_full(replace(plan, planning_ms=0.0))


def test_the_same_plan_is_made_from_the_same_arguments(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    profile = blocks(4, link=FAST_LINK)
    start: dict[int, Choice] = {value.id: "swap" for value in profile.activations[:3]}
    told: list[tuple[str, float]] = []
    arguments: list[dict[str, Any]] = [
        {"budget": "70%", "start": start, "effort": "fast"},
        {"budget": "min"},
        {"budget": "95%", "policy": "tflms", "policy_options": {"n_tensors": 3}},
    ]
    aside = [pooch.plan(profile, progress=lambda *step: told.append(step), **each) for each in arguments]
    known = pooch.plan(profile, "75%", known=aside[:1])
    assert len(asked) == 4
    assert told[-1] == ("planned", 1.0)
    monkeypatch.setattr(planning, "is_worthwhile", lambda profile: False)
    assert list(map(facts, aside)) == [facts(pooch.plan(profile, **each)) for each in arguments]
    assert facts(known) == facts(pooch.plan(profile, "75%", known=aside[:1]))
    assert len(asked) == 4


def test_errors_are_those_of_planning_here(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    profile = blocks(4)
    for budget, policy, kind in (("1%", "ilp", InfeasibleBudget), ("70%", "nobody", UsageError)):
        monkeypatch.setattr(planning, "is_worthwhile", lambda profile: True)
        with pytest.raises(kind) as aside:
            pooch.plan(profile, budget, policy=policy)
        monkeypatch.setattr(planning, "is_worthwhile", lambda profile: False)
        with pytest.raises(kind) as here:
            pooch.plan(profile, budget, policy=policy)
        assert str(aside.value) == str(here.value)
        assert vars(aside.value) == vars(here.value)
    assert len(asked) == 2


def test_without_such_a_process_plans_are_made_here(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    profile = blocks(4, link=FAST_LINK)
    expected = facts(pooch.plan(profile, "70%"))
    # GIVEN an argument that no other process can be given
    progressed: list[str] = []
    odd = {"n_tensors": type("Odd", (int,), {})(3)}
    plan = pooch.plan(
        profile, "95%", policy="tflms", policy_options=odd, progress=lambda text, _: progressed.append(text)
    )
    assert (plan.policy, len(asked)) == ("tflms(n_tensors=3)", 1)
    # GIVEN a Python that cannot be started, and one that ends at once
    for program in ("/nowhere/python", "/bin/true"):
        monkeypatch.setattr(sys, "executable", program)
        assert facts(pooch.plan(profile, "70%")) == expected


def test_ctrl_c_is_passed_on_once_and_the_best_plan_so_far_is_the_answer(waiting: Child) -> None:
    pressed: list[int] = []

    def press(process: int) -> None:
        pressed.append(process)
        raise KeyboardInterrupt

    assert waiting.ask(True, progress=press) is True
    assert len(pressed) == 1


def test_ctrl_c_before_there_is_a_plan_ends_both(waiting: Child) -> None:
    pressed: list[int] = []

    def press(process: int) -> None:
        pressed.append(process)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waiting.ask(False, progress=press)
    assert not is_running(pressed[0])


def test_an_error_of_the_callers_progress_ends_the_process_at_once(waiting: Child) -> None:
    told: list[int] = []

    def fails(process: int) -> None:
        told.append(process)
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"), waiting:
        waiting.ask(True, progress=fails)
    assert not is_running(told[0])


KILLED = """
from pooch.api.children import Child
from tests.api import child_work

child_work.let_children_do_it()
Child("wait", imports_as_here=True).ask(True, progress=lambda process: print(process, flush=True))
"""


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    waited(lambda: not is_running(child))


def waited(holds: Callable[[], bool]) -> None:
    """Wait until it holds; the limit of the test is the only clock."""
    while not holds():
        time.sleep(0.05)


IN_TRAINING = """
import sys
import torch
import pooch
from pooch.api import planning_aside

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(32)])
data = torch.randn(64, 64)
forward = lambda: model(data).square().mean()
profile = pooch.profile(forward, model)
planning_aside.FEWEST_OPS = min(planning_aside.FEWEST_OPS, len(profile.ops))
plan = pooch.plan(profile, "80%")
with pooch.apply(plan, model) as run:
    forward().backward()
assert run.stats.mismatches == 0
print(sorted({"highspy", "pandas", "pulp", "matplotlib", "pydantic", "pooch.planner.search"} & sys.modules.keys()))
"""


def test_a_process_that_profiles_plans_and_trains_imports_no_solver_and_no_tables() -> None:
    command = [sys.executable, "-c", IN_TRAINING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_a_process_without_torch_and_small_steps_are_planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = blocks(2), blocks(2)
    monkeypatch.setattr(planning_aside, "FEWEST_OPS", len(small.ops) + 1)
    assert not planning_aside.is_worthwhile(small)
    monkeypatch.setattr(planning_aside, "FEWEST_OPS", len(large.ops))
    assert planning_aside.is_worthwhile(large)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not planning_aside.is_worthwhile(large)
