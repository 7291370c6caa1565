"""The boundary to PuLP and HiGHS: bounds, limits, and what is said when the solver is missing or crashes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pulp
import pytest

from pooch.planner.program import solver
from pooch.planner.program.solver import Limits, Problem, SolverUnavailable, Variable, solve, weighted
from tests.children import child_environment

LIMITS = Limits(gap=0.0, nodes=1000, time_s=10.0)
PRICES, WEIGHTS = (10.0, 13.0, 7.0, 8.0), (5.0, 7.0, 3.0, 4.0)  # best under weight 11: the last three but one


def knapsack() -> tuple[Problem, list[Variable]]:
    problem = Problem("knapsack")
    taken = [problem.new(f"taken_{place}", 1, whole=True) for place in range(len(PRICES))]
    problem += weighted({variable: -price for variable, price in zip(taken, PRICES, strict=True)})
    problem += weighted(dict(zip(taken, WEIGHTS, strict=True))) <= 11.0, "weight"
    return problem, taken


def test_highs_finds_the_optimum_and_its_bound() -> None:
    problem, taken = knapsack()
    solution = solve(problem, LIMITS)
    assert [round(solution.values[variable.name]) for variable in taken] == [0, 1, 0, 1]
    assert (solution.objective, solution.bound) == (pytest.approx(-21), pytest.approx(-21))


def test_nothing_is_printed() -> None:
    """In a process of its own: HiGHS prints its banner once."""
    code = "from tests.planner.test_solver import LIMITS, knapsack, solve; solve(knapsack()[0], LIMITS)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
    assert (done.stdout, done.stderr) == ("", "")


def test_a_start_that_is_optimal_is_kept() -> None:
    problem, taken = knapsack()
    solution = solve(problem, LIMITS, dict(zip(taken, (0.0, 1.0, 0.0, 1.0), strict=True)))
    assert solution.objective == pytest.approx(-21)


def test_a_variable_in_no_row_does_no_harm() -> None:
    problem, taken = knapsack()
    idle = problem.new("idle", 1, whole=True)
    solution = solve(problem, LIMITS, {idle: 1.0, taken[0]: 0.0})
    assert list(solution.values) == [*(variable.name for variable in taken), "idle"]
    assert solution.objective == pytest.approx(-21)


def test_the_node_limit_leaves_a_valid_bound() -> None:
    solution = solve(knapsack()[0], Limits(gap=0.0, nodes=0, time_s=10.0))
    assert solution.bound <= -21 + 1e-6


def test_an_infeasible_program_is_said_to_be() -> None:
    problem, taken = knapsack()
    problem += taken[0] >= 2.0, "too_many"
    solution = solve(problem, LIMITS)
    assert solution.bound == math.inf
    assert not solution.values


def test_without_highs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(SolverUnavailable, match="pip install highspy"):
        solve(knapsack()[0], LIMITS)


def test_a_crash_is_told_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: object, problem: object) -> None:
        raise MemoryError("no room for the basis")

    monkeypatch.setattr(pulp.HiGHS, "callSolver", crash)
    with pytest.raises(SolverUnavailable, match="MemoryError: no room for the basis"):
        solve(knapsack()[0], LIMITS)


def test_a_solver_that_does_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a solver that ends when somebody says so, and not by itself
    call, end = pulp.HiGHS.callSolver, threading.Event()

    def endless(self: object, problem: object) -> None:
        call(self, problem)
        end.wait()

    monkeypatch.setattr(pulp.HiGHS, "callSolver", endless)
    # WHEN it is waited for
    solution = solve(knapsack()[0], replace(LIMITS, latest_s=0.2))
    # THEN there is an answer while it still runs: no solution, and no bound that would be wrong
    assert not solution.values
    assert solution.bound < math.inf
    assert solution.bound <= -21
    assert [thread.name for thread in solver._abandoned if thread.is_alive()] == ["pooch-solver"]
    # AND nothing is left of it in the end
    end.set()
    solver._wait_for_abandoned()
    assert not any(thread.is_alive() for thread in solver._abandoned)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Python ignores Ctrl-C where the shell started it in the background (`make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_the_solver_at_once() -> None:
    # GIVEN a program that HiGHS works on for minutes
    random = Random(1)
    problem = Problem("hard")
    taken = [problem.new(f"taken_{place}", 1, whole=True) for place in range(300)]
    problem += weighted({variable: -random.randint(50, 99) for variable in taken})
    for row in range(60):
        problem += weighted({variable: float(random.randint(1, 99)) for variable in taken}) <= 6000.0, f"row_{row}"
    # WHEN somebody presses Ctrl-C after half a second
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        solve(problem, Limits(gap=0.0, nodes=10**9, time_s=1e6))
    # THEN it has ended, which by its own limit it would not have before the suite's; and the next is solved as ever
    assert solve(knapsack()[0], LIMITS).objective == pytest.approx(-21)


FIRST_PLAN = """
import gc, weakref

class Model: ...

def train():
    model = Model()
    import pooch.planner.program.solver
    return weakref.ref(model)

model = train()
gc.collect()
print("alive" if model() else "gone")
"""


def test_whoever_plans_first_can_let_go_of_the_model() -> None:
    """PuLP keeps exceptions, which keep all frames that were running when it was imported."""
    done = subprocess.run([sys.executable, "-c", FIRST_PLAN], capture_output=True, text=True, check=True)
    assert done.stdout == "gone\n"
