"""The only file that knows PuLP: linear programs with whole numbers, solved by HiGHS, or CBC where it is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pooch.planner.program.importing import imported_apart
from pooch.planner.program.solver_thread import call_highs

pulp = imported_apart("pulp")

Variable = int  # position in the program
Terms = dict[Variable, float]  # a linear expression


class SolverUnavailable(Exception):
    """No solver is installed, or it crashed; the planner then answers with a cheap policy's plan."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When the solver may stop.

    Attributes:
        gap: relative distance of solution and bound at which it is done.
        nodes: branch-and-bound nodes (the same on every machine). time_s: a safety.
        latest_s: seconds after which it is left to itself where it does not heed its time limit.
    """

    gap: float
    nodes: int
    time_s: float
    latest_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes:
        values: one per variable; empty where no solution was found.
        objective: of the solution (inf without one). bound: no solution is below this (-inf if not even that is known).
        infeasible: it was proven that there is no solution.
        solver: who said so.
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    infeasible: bool
    solver: str


class LinearProgram:
    """Minimise a linear objective under rows `terms <= upper`; collects, then hands everything to PuLP at once."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float | None]] = []
        self._is_whole: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []
        self._objective: Terms = {}

    def variable(self, upper: float | None = None) -> Variable:
        """A continuous variable from 0 to `upper`."""
        self._bounds.append((0.0, upper))
        self._is_whole.append(False)
        return len(self._bounds) - 1

    def binary(self) -> Variable:
        """A variable that is 0 or 1."""
        return self.whole(1)

    def whole(self, most: int) -> Variable:
        """A whole number from 0 to `most`."""
        handle = self.variable(float(most))
        self._is_whole[handle] = True
        return handle

    def at_most(self, terms: Mapping[Variable, float], upper: float) -> None:
        """Add the row `terms <= upper`."""
        self._rows.append((dict(terms), upper))

    def minimise(self, terms: Mapping[Variable, float]) -> None:
        """Set the objective."""
        self._objective = dict(terms)

    @property
    def size(self) -> tuple[int, int]:
        """Variables and rows."""
        return len(self._bounds), len(self._rows)

    def solve(self, limits: Limits, start: Mapping[Variable, float] | None = None) -> Solution:
        """Hand the program to HiGHS, or to CBC where highspy is missing.

        Args:
            limits: when to stop.
            start: values of some variables of a known solution, for solvers that can use it.

        Raises:
            SolverUnavailable: neither solver is there, or it crashed.
        """
        try:
            if pulp.HiGHS(msg=False).available():
                return self._solve_with_highs(limits, start or {})
            if pulp.PULP_CBC_CMD(msg=False).available():
                return self._solve_with_cbc(limits)
        except SolverUnavailable:
            raise
        except Exception as error:  # PuLP and its solvers raise whatever they like; a plan must come out all the same
            raise SolverUnavailable(f"the solver failed: {type(error).__name__}: {error}") from error
        raise SolverUnavailable("neither HiGHS (pip install highspy) nor CBC is installed")

    def _problem(self) -> tuple[Any, list[Any]]:
        """The program as a PuLP problem, and its variables."""
        problem = pulp.LpProblem("pooch", pulp.LpMinimize)
        new_variable = getattr(problem, "add_variable", pulp.LpVariable)  # PuLP 3.3 on, and before
        width = len(str(len(self._bounds)))  # PuLP sorts by name; equal width keeps our order
        columns = [
            new_variable(f"x{index:0{width}d}", low, high, pulp.LpInteger if is_whole else pulp.LpContinuous)
            for index, ((low, high), is_whole) in enumerate(zip(self._bounds, self._is_whole, strict=True))
        ]
        problem += pulp.LpAffineExpression([(columns[i], factor) for i, factor in self._objective.items()])
        for terms, upper in self._rows:
            expression = pulp.LpAffineExpression([(columns[i], factor) for i, factor in terms.items()])
            problem.addConstraint(pulp.LpConstraint(expression, pulp.LpConstraintLE, rhs=upper))
        return problem, columns

    def _solve_with_highs(self, limits: Limits, start: Mapping[Variable, float]) -> Solution:
        """Through PuLP's HiGHS, step by step.

        Its one-call form fails where the node limit is reached, and takes no start.
        """
        problem, columns = self._problem()
        solver = pulp.HiGHS(
            msg=False, timeLimit=max(0.1, limits.time_s), gapRel=limits.gap, mip_max_nodes=limits.nodes, random_seed=0
        )
        solver.createAndConfigureSolver(problem)
        solver.buildSolverModel(problem)
        model = problem.solverModel
        place = {column.name: column.index for column in problem.variables()}  # without those in no row
        if start:
            known = {
                place[columns[variable].name]: value
                for variable, value in start.items()
                if columns[variable].name in place
            }
            model.setSolution(len(known), list(known), list(known.values()))
        bound_when_left = call_highs(solver, problem, limits.latest_s)
        if bound_when_left is not None:
            return Solution((), math.inf, bound_when_left, False, "HiGHS")
        status, info = str(model.getModelStatus()), model.getInfo()
        if status.endswith(("kInfeasible", "kUnboundedOrInfeasible")):
            return Solution((), math.inf, math.inf, True, "HiGHS")
        if status.endswith(("kNotset", "Error", "kMemoryLimit")):
            raise SolverUnavailable(f"HiGHS stopped with {status.rpartition('.')[2]}")
        objective, values = float(info.objective_function_value), list(model.getSolution().col_value)
        bound = float(info.mip_dual_bound) if any(self._is_whole) else objective
        if not math.isfinite(objective) or info.primal_solution_status != 2:
            return Solution((), math.inf, bound, False, "HiGHS")
        found = tuple(values[place[column.name]] if column.name in place else 0.0 for column in columns)
        return Solution(found, objective, bound, False, "HiGHS")

    def _solve_with_cbc(self, limits: Limits) -> Solution:
        """CBC tells no dual bound through PuLP, so the bound is that of the relaxation without integrality."""
        relaxed, _ = self._problem()
        relaxed.solve(pulp.PULP_CBC_CMD(msg=False, mip=False, timeLimit=max(1.0, limits.time_s / 2)))
        if relaxed.status == pulp.LpStatusInfeasible:
            return Solution((), math.inf, math.inf, True, "CBC")
        is_solved = relaxed.sol_status == pulp.LpSolutionOptimal
        bound = float(pulp.value(relaxed.objective)) if is_solved else -math.inf
        problem, columns = self._problem()
        options = {"gapRel": limits.gap, "timeLimit": max(1.0, limits.time_s / 2), "maxNodes": limits.nodes}
        problem.solve(pulp.PULP_CBC_CMD(msg=False, **options))
        if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return Solution((), math.inf, bound, problem.status == pulp.LpStatusInfeasible, "CBC")
        values = tuple(float(column.varValue or 0.0) for column in columns)
        return Solution(values, float(pulp.value(problem.objective)), bound, False, "CBC")
