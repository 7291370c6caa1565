"""The integer program as the policy that nobody beats: no other policy's plan is faster, nor that of a smaller rung.

What it gives for a budget is the fastest of: the plan of the program with its local search, which starts from simple
rules; the plans of the program with swaps or replays alone; and the same for the rungs below the
budget, as far as bounds do not rule out that they are faster.
"""

from __future__ import annotations

from dataclasses import replace

from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.search.evaluators import Remembering
from pooch.planner.search.restricted import better_of_restricted
from pooch.planner.search.rungs import better_of_smaller
from pooch.planner.search.search import plan_by_program


def ilp(request: PlanningRequest) -> PolicyOutcome:
    """Plan with the integer program.

    Raises:
        InfeasibleBudget: no plan was found, neither by rules nor by looking for the leanest one.
    """
    remembering = Remembering(request.evaluator, request.dataflow.end)
    request = replace(request, evaluator=remembering)
    return better_of_smaller(request, plan_alone(request), plan_alone)


def plan_alone(request: PlanningRequest) -> PolicyOutcome:
    """The plan for this budget, whatever there is for smaller ones.

    Raises:
        InfeasibleBudget: no plan was found.
    """
    candidates = Candidates(request.dataflow)
    outcome = plan_by_program(request, candidates, "ilp")
    return better_of_restricted(request, outcome)
