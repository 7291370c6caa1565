"""One program for everything on the device: activations, and what outlives the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle
from ..ir.plan import Choice, Decision, Decisions
from .candidates import Candidates
from .contract import PlanningRequest
from .program.marks import choose_marks
from .program.solver import Limits, SolverUnavailable, solve
from .program.step_program import StepProgram
from .reasons import decision_rows
from .search.programs import FINE, OF_MANY, TOLERANCE
from .search.trials import MANY

_SHARE = 0.3  # of the time limit


@dataclass(frozen=True, slots=True)
class JointSolution:
    """What the program says.

    Attributes:
        bound_ms: no plan under the budget is faster in the simulator's model, whatever moves; inf where nothing fits.
        decisions: for activations; empty where the solver found none.
        resident_points: int64 array of shape (2 * ops,): what of the tensors that outlive the step is there at each point.
    """

    bound_ms: float
    decisions: dict[int, Choice]
    resident_points: numpy.ndarray


def joint_program(request: PlanningRequest, cycle: Cycle) -> StepProgram:
    """The program, whose optimum no plan is below.

    Args:
        request: of the step without what could leave of what outlives it.
        cycle: the step with all of it.
    """
    candidates = Candidates(request.dataflow)
    detail = OF_MANY if len(candidates.items) > MANY else FINE
    return StepProgram(
        candidates,
        choose_marks(candidates, detail.pieces),
        request.budget_bytes,
        host_budget_bytes=request.host_budget_bytes,
        merge=detail.merge,
        cycle=cycle,
    )


def solve_jointly(request: PlanningRequest, cycle: Cycle) -> JointSolution | None:
    """Solve the program, or return None without a solver. The arguments are those of `joint_program`."""
    program = joint_program(request, cycle)
    assert program.persistent is not None
    detail = OF_MANY if len(program.candidates.items) > MANY else FINE
    left_s = max(0.1, _SHARE * request.remaining_s())
    try:
        solution = solve(program.problem, Limits(detail.gap, detail.nodes, left_s, 2 * left_s))
    except SolverUnavailable:
        return None
    values = dict(solution.values)
    decisions = program.decisions(values) if values else {}
    return JointSolution(solution.bound * (1 - TOLERANCE), decisions, program.persistent.resident_points(values))


def explained(dataflow: Dataflow, decisions: Decisions) -> tuple[Decision, ...]:
    """One row for each activation, with the reason of what was decided."""
    return decision_rows(Candidates(dataflow), decisions, {})
