"""Solves an integer program with HiGHS, through PuLP, for no longer than anybody wants to wait.

HiGHS runs in a thread of its own: its simplex method checks neither its time limit nor a request to stop while it
struggles with one basis (5 s were seen), and Python notices Ctrl-C only between calls.
"""

from __future__ import annotations

import atexit
import importlib
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

POLL_S = 0.05
_abandoned: list[threading.Thread] = []

# PuLP keeps the exceptions of solvers that are not installed, and an exception keeps every frame that was running.
# Imported in a thread of its own, PuLP cannot keep alive the model of a user's function that plans for the first time.
with ThreadPoolExecutor(1, thread_name_prefix="pooch-import") as _pool:
    pulp: Any = _pool.submit(importlib.import_module, "pulp").result()

Variable = Any  # pulp.LpVariable
Expression = Any  # pulp.LpAffineExpression


class SolverUnavailable(Exception):
    """HiGHS is missing or crashed; the planner then answers with the best plan of the rules and the local search."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When the solver may stop.

    Attributes:
        gap: relative distance between solution and bound at which it is done.
        nodes: branch-and-bound nodes (the same on every machine).
        time_s: a safety net.
        latest_s: seconds after which it is abandoned if it does not heed its time limit.
    """

    gap: float
    nodes: int
    time_s: float
    latest_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes:
        values: by the name of the variable; empty where no solution was found.
        objective: of the solution (inf without one).
        bound: no solution is below this (-inf if not even that is known; inf if it was proven that there is none).
    """

    values: Mapping[str, float]
    objective: float
    bound: float


class Problem(pulp.LpProblem):  # type: ignore[misc]
    """A PuLP problem to minimise, whose variables keep the order in which they were made; PuLP sorts them by name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, pulp.LpMinimize)
        self._made: list[Variable] = []

    def new(self, name: str, upper: float | None = None, *, whole: bool = False) -> Variable:
        """A variable from 0 to `upper`."""
        make = getattr(self, "add_variable", pulp.LpVariable)  # PuLP from 3.3 on, and before
        self._made.append(make(name, 0.0, upper, pulp.LpInteger if whole else pulp.LpContinuous))
        return self._made[-1]

    def variables(self) -> list[Variable]:
        """All variables; PuLP asks for them in order to build HiGHS's columns."""
        return self._made


def weighted(terms: Mapping[Variable, float]) -> Expression:
    """The sum of variables times their factors; far faster than adding them one by one."""
    return pulp.LpAffineExpression(terms)


def solve(problem: Problem, limits: Limits, start: Mapping[Variable, float] | None = None) -> Solution:
    """Hand the problem to HiGHS, step by step: PuLP's single call fails at the node limit, and takes no start.

    `start` has values of some variables of a known solution.

    Raises:
        SolverUnavailable: HiGHS is not installed, or it crashed.
        KeyboardInterrupt: Ctrl-C was pressed; HiGHS has stopped.
    """
    if not pulp.HiGHS(msg=False).available():
        raise SolverUnavailable("HiGHS is not installed: run pip install highspy")
    solver = pulp.HiGHS(msg=False)
    try:
        problem.solverModel = _empty_model(limits)
        solver.buildSolverModel(problem)
        if start:
            places = [variable.index for variable in start]
            problem.solverModel.setSolution(len(start), places, list(start.values()))
        run = _Run(solver, problem)
        run.start()
        bound_when_abandoned = run.wait(limits.latest_s)
    except Exception as error:  # PuLP and HiGHS raise all kinds of errors; there has to be a plan even so
        raise SolverUnavailable(f"the solver failed: {type(error).__name__}: {error}") from error
    if bound_when_abandoned is not None:
        return Solution({}, math.inf, bound_when_abandoned)
    model = problem.solverModel
    status, info = str(model.getModelStatus()).rpartition(".")[2], model.getInfo()
    if status in ("kInfeasible", "kUnboundedOrInfeasible"):
        return Solution({}, math.inf, math.inf)
    if status in ("kNotset", "kMemoryLimit") or status.endswith("Error"):
        raise SolverUnavailable(f"HiGHS stopped with {status}")
    objective = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if problem.isMIP() else objective
    if not math.isfinite(objective) or info.primal_solution_status != 2:
        return Solution({}, math.inf, bound)
    names = (variable.name for variable in problem.variables())
    return Solution(dict(zip(names, model.getSolution().col_value, strict=True)), objective, bound)


@cache
def _quiet_highs() -> Any:
    """`highspy.Highs` that prints nothing: from 1.16 on it prints a banner before its maker could set an option."""
    kind: Any = importlib.import_module("highspy").Highs

    class QuietHighs(kind):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # noqa: N802  (the first that it does with itself)
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return QuietHighs


def _empty_model(limits: Limits) -> Any:
    model = _quiet_highs()()
    options = {
        "output_flag": False,
        "time_limit": max(0.1, limits.time_s),
        "mip_rel_gap": limits.gap,
        "mip_max_nodes": limits.nodes,
        "random_seed": 0,
    }
    for name, value in options.items():
        model.setOptionValue(name, value)
    return model


class _Run(threading.Thread):
    """One run of HiGHS on a problem, whose solver model is read when it is done."""

    def __init__(self, solver: Any, problem: Problem) -> None:
        super().__init__(name="pooch-solver", daemon=True)
        self._solver, self._problem = solver, problem
        self._raised: BaseException | None = None
        self._bound = -math.inf
        problem.solverModel.HandleUserInterrupt = True
        problem.solverModel.cbMipInterrupt += self._take_bound

    def run(self) -> None:
        model = self._problem.solverModel
        try:
            self._solver.callSolver(self._problem)
            type(model).resetGlobalScheduler(False)  # its workers belong to this thread; left alone they abort at exit
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits)
            self._raised = error

    def _take_bound(self, event: Any) -> None:
        self._bound = max(self._bound, event.data_out.mip_dual_bound)

    def wait(self, latest_s: float) -> float | None:
        """Wait until it is done, or abandon it after `latest_s` seconds; it then stops at the next opportunity.

        Returns:
            None where it is done; else the best dual bound it had reported (-inf without one), and nothing of the
            model may be touched any more.
        """
        latest_s += time.monotonic()
        try:
            while self.is_alive():
                self.join(POLL_S)
                if self.is_alive() and time.monotonic() > latest_s:
                    self._problem.solverModel.cancelSolve()
                    _abandoned[:] = [each for each in _abandoned if each.is_alive()] + [self]
                    return self._bound
        except KeyboardInterrupt:
            self._problem.solverModel.cancelSolve()
            self.join()
            raise
        if self._raised is not None:
            raise self._raised
        return None


@atexit.register
def _wait_for_abandoned() -> None:
    """A solver that is still running when the interpreter exits would abort the process."""
    for thread in _abandoned:
        thread.join()
