"""The integer program of a budget as a file that people and solvers read."""

from __future__ import annotations

from pathlib import Path

from pooch.analysis.dataflow import Dataflow
from pooch.planner.candidates import Candidates
from pooch.planner.contract import Evaluator, PlanningRequest
from pooch.planner.search.programs import Programs
from pooch.planner.search.trials import Trials


def write_program(
    dataflow: Dataflow, budget_bytes: int, evaluator: Evaluator, path: Path, host_budget_bytes: int | None = None
) -> None:
    """Write the program whose optimum is the lower bound for a budget, in CPLEX's LP format.

    Names of variables and rows are those of docs/planner.md.
    """
    request = PlanningRequest(dataflow, budget_bytes, evaluator, host_budget_bytes)
    Programs(Trials(request, Candidates(dataflow))).relaxation().problem.writeLP(str(path))
