"""More memory is never slower: the plans of smaller budgets are plans for this one, so they are looked at too.

A plan for a budget that depended on all smaller budgets would take all of their time. So there is a ladder: every
`RUNG_PERCENT` of the in-core peak, for everybody the same. A rung's own plan depends on nothing else; the answer to a
budget is the fastest of its own plan and those of the rungs below it. A rung whose lower bound is not below the best
plan so far cannot give a faster one, nor can any rung below it: with small gaps one bound is all that this costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pooch.errors import InfeasibleBudget
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest, Policy, PolicyOutcome
from pooch.planner.search.evaluators import OutOfTime, part_of
from pooch.planner.search.search import is_final, program_bound_ms

RUNG_PERCENT = 5
NO_TIME = "the time limit left no time to look at smaller budgets: one of their plans may be faster"


def rungs_below(peak_bytes: int, budget_bytes: int) -> Iterator[int]:
    """The rungs of the ladder under a budget, the largest first."""
    for percent in range(100, 0, -RUNG_PERCENT):
        rung_bytes = int(percent * peak_bytes / 100)
        if 0 < rung_bytes < budget_bytes:
            yield rung_bytes


def better_of_smaller(request: PlanningRequest, outcome: PolicyOutcome, plan_alone: Policy) -> PolicyOutcome:
    """The outcome, or a faster plan of a rung below its budget, under the same bound.

    Args:
        plan_alone: plans one budget without regard to others.
    """
    if not outcome.proven:  # without bounds every rung would have to be planned
        return outcome
    best = outcome
    candidates = Candidates(request.dataflow)
    for rung_bytes in rungs_below(request.dataflow.profile.peak_bytes, request.budget_bytes):
        if is_final(best):
            return best
        if request.remaining_s() <= 0.1 * request.time_limit_s:
            return best.with_note(NO_TIME)
        request.report("looking at smaller budgets", 0.95)
        below = replace(part_of(request), budget_bytes=rung_bytes, known=())
        try:
            if program_bound_ms(below, candidates) >= best.step_ms:
                return best
            best = best.or_faster(plan_alone(below))
        except InfeasibleBudget:
            return best
        except OutOfTime:
            return best.with_note(NO_TIME)
        except KeyboardInterrupt:
            return best.stopped()
    return best
