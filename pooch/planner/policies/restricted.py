"""The integer program over fewer choices: as methods of their own, and as a way out of the full program's valleys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pooch.errors import InfeasibleBudget
from pooch.planner.candidates import Candidate, Candidates
from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.units import format_ms

Allowed = Literal["swap", "recompute"]
Planner = Callable[[PlanningRequest, Candidates, str], PolicyOutcome]
CLOSE_ENOUGH = 0.001  # a plan this near the bound is as good as can be
MOST = 400  # activations; beyond that a second and third program take too long


def restricted_outcome(request: PlanningRequest, allowed: Allowed, policy: str, plan: Planner) -> PolicyOutcome:
    """Plan with keep and one other choice. The bound of the restricted program is none on all plans: it becomes a note.

    Args:
        plan: the program over given candidates.

    Raises:
        InfeasibleBudget: no such plan was found.
    """
    candidates = Candidates(request.dataflow)
    candidates.items = tuple(_only(item, allowed) for item in candidates.items)
    outcome = plan(request, candidates, policy)
    told = f"with keep and {allowed} alone no plan is faster than {format_ms(outcome.lower_bound_ms)}"
    notes = (*outcome.notes, told) if outcome.proven else outcome.notes
    return replace(outcome, lower_bound_ms=candidates.compute_ms, proven=False, notes=notes)


def better_of_restricted(request: PlanningRequest, outcome: PolicyOutcome, plan: Planner) -> PolicyOutcome:
    """The outcome of the full program, or a faster plan of a restricted one under the same bound.

    The full program is solved to a gap; a restricted one, being smaller, sometimes finds what lies inside of that gap.
    """
    best = outcome
    for allowed in _worth_trying(request, outcome):
        try:
            other = restricted_outcome(replace(request, progress=None), allowed, "ilp", plan)
        except InfeasibleBudget:
            continue
        if other.evaluation.timeline.step_ms < best.evaluation.timeline.step_ms - 1e-6:
            best = replace(outcome, decisions=other.decisions, evaluation=other.evaluation)
    return best


def _worth_trying(request: PlanningRequest, outcome: PolicyOutcome) -> tuple[Allowed, ...]:
    step_ms = outcome.evaluation.timeline.step_ms
    is_close = step_ms <= outcome.lower_bound_ms * (1 + CLOSE_ENOUGH)
    is_short_of_time = request.remaining_s() < 0.3 * request.time_limit_s
    was_stopped = any("interrupted" in note or "solver" in note for note in outcome.notes)
    if is_close or is_short_of_time or was_stopped or len(outcome.decisions) > MOST or not outcome.proven:
        return ()
    return ("swap", "recompute")


def _only(item: Candidate, allowed: Allowed) -> Candidate:
    if allowed == "swap":
        return replace(item, can_recompute=False, can_join=False)
    return replace(item, can_swap=False)
