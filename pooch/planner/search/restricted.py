"""The integer program over fewer choices: as methods of their own, and as a way out of the full program's valleys."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pooch.errors import InfeasibleBudget
from pooch.planner.candidates import Candidate, Candidates
from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.search.evaluators import OutOfTime, part_of
from pooch.planner.search.search import is_final, plan_by_program, program_bound_ms
from pooch.units import format_ms

Allowed = Literal["swap", "recompute"]
MOST = 400  # activations; beyond that a second and third program take too long
NO_TIME = "the time limit left no time to try swaps alone and replays alone"


def restricted_outcome(request: PlanningRequest, allowed: Allowed, policy: str) -> PolicyOutcome:
    """Plan with keep and one other choice. The bound of the restricted program is none on all plans: it becomes a note.

    Raises:
        InfeasibleBudget: no such plan was found.
    """
    candidates = _allowing(request, allowed)
    outcome = plan_by_program(replace(request, known=()), candidates, policy)
    told = f"with keep and {allowed} alone no plan is faster than {format_ms(outcome.lower_bound_ms)}"
    notes = (*outcome.notes, told) if outcome.proven else outcome.notes
    return replace(outcome, lower_bound_ms=candidates.compute_ms, proven=False, notes=notes)


def better_of_restricted(request: PlanningRequest, outcome: PolicyOutcome) -> PolicyOutcome:
    """The outcome of the full program, or a faster plan of a restricted one under the same bound.

    The full program is solved to a gap; a restricted one, being smaller, sometimes finds what lies inside of that gap.
    It is not asked where its own bound says that it cannot.
    """
    if len(outcome.decisions) > MOST:
        return outcome
    best = outcome
    for allowed in ("swap", "recompute"):
        if is_final(best):
            return best
        if request.remaining_s() <= 0.1 * request.time_limit_s:
            return best.with_note(NO_TIME)
        part = part_of(request)
        try:
            if program_bound_ms(part, _allowing(request, allowed)) < best.step_ms:
                best = best.or_faster(restricted_outcome(part, allowed, "ilp"))
        except InfeasibleBudget:
            continue
        except OutOfTime:
            return best.with_note(NO_TIME)
        except KeyboardInterrupt:
            return best.stopped()
    return best


def _allowing(request: PlanningRequest, allowed: Allowed) -> Candidates:
    candidates = Candidates(request.dataflow)
    candidates.items = tuple(_only(item, allowed) for item in candidates.items)
    return candidates


def _only(item: Candidate, allowed: Allowed) -> Candidate:
    if allowed == "swap":
        return replace(item, can_recompute=False, can_join=False)
    return replace(item, can_swap=False)
