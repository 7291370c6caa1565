"""One program for everything on the device: activations, and what outlives the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle
from ..ir.plan import Choice, Decisions
from .candidates import Candidates
from .contract import PlanningRequest, PolicyOutcome
from .program.marks import choose_marks
from .program.solver import Limits, SolverUnavailable, solve
from .program.step_program import StepProgram
from .reasons import decision_rows
from .search.programs import FINE, OF_MANY, TOLERANCE
from .search.rules import warm_start
from .search.trials import MANY, Trials

_SHARE = 0.3  # of the time limit


@dataclass(frozen=True, slots=True)
class JointSolution:
    """What the program says.

    Attributes:
        bound_ms: no plan under the budget is faster in the simulator's model, whatever moves; inf where nothing fits.
        decisions: for activations; empty where the solver found none.
        resident_points: int64 array of shape (2 * ops,): what of the tensors that outlive the step is there at each
            point.
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


def fitted(request: PlanningRequest, decisions: Decisions) -> PolicyOutcome | None:
    """A plan with these decisions, or if they do not fit with a few more activations that leave; None if that does not.

    Args:
        request: what to plan for. The decisions may be for other bytes.
        decisions: for its activations.
    """
    trials = Trials(request)
    warm_start(trials, decisions)
    best = trials.best
    if best is None:
        return None
    rows = decision_rows(trials.candidates, best.decisions, {})
    return PolicyOutcome(best.decisions, best.evaluation, trials.candidates.compute_ms, rows=rows)


def single_changes(dataflow: Dataflow, decisions: Decisions) -> Iterator[dict[int, Choice]]:
    """Yield the decisions with one of them changed, those on the largest activations first."""
    for item in sorted(Candidates(dataflow).items, key=lambda item: (-item.memory_bytes, item.value)):
        for choice in item.choices:
            if choice != decisions.get(item.value, "keep"):
                yield {**decisions, item.value: choice}
