"""The integer program over fewer choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pooch.planner.candidates import Candidate, Candidates
from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.policies.ilp import plan_by_program
from pooch.units import format_ms


def restricted_outcome(request: PlanningRequest, allowed: Literal["swap", "recompute"], policy: str) -> PolicyOutcome:
    """Plan with keep and one other choice. The bound of the restricted program is none on all plans: it becomes a note.

    Raises:
        InfeasibleBudget: no such plan was found.
    """
    candidates = Candidates(request.dataflow)
    candidates.items = tuple(_only(item, allowed) for item in candidates.items)
    outcome = plan_by_program(request, candidates, policy)
    told = f"with keep and {allowed} alone no plan is faster than {format_ms(outcome.lower_bound_ms)}"
    notes = (*outcome.notes, told) if outcome.proven else outcome.notes
    return replace(outcome, lower_bound_ms=candidates.compute_ms, proven=False, notes=notes)


def _only(item: Candidate, allowed: str) -> Candidate:
    if allowed == "swap":
        return replace(item, can_recompute=False, can_join=False)
    return replace(item, can_swap=False)
