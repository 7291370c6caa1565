"""PoocH's baseline `swap_all` (Ito et al. 2019): swap every map, and hoist copies in as far as memory permits.

Procedure (read: the authors' Chainer fork):
1. copy out every feature map when it is complete, whether or not there is room for it;
2. hoist the copies in, in order of need, to the earliest step from which on the budget holds.

Ours: values that have to leave are freed at the slot that the lowering names (PoocH: when the copy ends). Values for
which there is room are copied out and back all the same. Under a host budget, which PoocH does not have, later
activations stay.
"""

from __future__ import annotations

from ...errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of
from ...planner.search.stall_rule import swaps_within_tier
from ...planner.search.trials import Trial, Trials
from .timing import anchors_ahead, everything_leaves, played, started_at, swap_schedule, trips_of


def swap_all(request: PlanningRequest) -> PolicyOutcome:
    """Swap every activation that can be away, in forward order while the tier has room; keep the others.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return everything_swapped(request, "swap_all")


def everything_swapped(request: PlanningRequest, policy: str, ahead: int | None = None) -> PolicyOutcome:
    """Swap every activation, and copy each in as early as there is room.

    Args:
        request: what to plan.
        policy: name of the method, for errors.
        ahead: the most anchors by which a copy in may start before its need. None: any number.

    Raises:
        InfeasibleBudget: that does not fit; gives a budget at which it does.
    """
    trials = Trials(request)
    decisions = swaps_within_tier(trials)
    trial = _lowered(trials, decisions, request.budget_bytes, ahead)
    if not trial.fits:
        least_bytes = trials.least_budget(decisions)
        trial = _lowered(trials, decisions, least_bytes, ahead)
        if not trial.fits:
            raise InfeasibleBudget(request.budget_bytes, least_bytes, policy)
    kept = sum(item.can_wait for item in trials.candidates.items) - len(decisions)
    notes = (f"{kept} activations are kept because the host budget is used up",) if kept else ()
    return outcome_of(trials, trial, notes)


def _lowered(trials: Trials, decisions: dict[int, Choice], budget_bytes: int, ahead: int | None) -> Trial:
    evaluator, dataflow = trials.request.evaluator, trials.request.dataflow
    evaluation = everything_leaves(evaluator, dataflow, decisions, budget_bytes)
    if ahead is not None:
        schedule = evaluation.schedule
        late = started_at(trips_of(schedule), anchors_ahead(dataflow, ahead))
        evaluation = played(evaluator, swap_schedule(dataflow, schedule, late, schedule))
    return trials.offer(trials.complete(decisions), evaluation)
