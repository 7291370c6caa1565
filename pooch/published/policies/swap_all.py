"""PoocH's baseline `swap_all` (Ito et al. 2019): every map leaves, its copy back is hoisted as far as memory permits.

Procedure (read: the authors' Chainer fork):
1. every feature map is copied out when it is complete, whether or not there is room for it;
2. copies in are hoisted, in order of need, to the earliest step from which on the budget holds.

Ours: what has to leave is freed at the slot that the lowering names (PoocH: when its copy ends). What has room to stay
is copied out and back all the same. Where a host budget is given, later activations stay (PoocH has none).
"""

from __future__ import annotations

from ...errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import outcome_of
from ...planner.search.stall_rule import swaps_within_tier
from ...planner.search.trials import Trial, Trials
from .timing import delayed, everything_leaves, played, swap_schedule, trips_of


def swap_all(request: PlanningRequest) -> PolicyOutcome:
    """Swap every activation that is away for some time, in forward order as far as the tier goes; keep the others.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return everything_swapped(request, "swap_all")


def everything_swapped(request: PlanningRequest, policy: str, anchors_ahead: int | None = None) -> PolicyOutcome:
    """Every activation leaves; each comes back as early as there is room, or at most so many anchors ahead.

    Raises:
        InfeasibleBudget: that does not fit; the minimum does.
    """
    trials = Trials(request, Candidates(request.dataflow))
    decisions = swaps_within_tier(trials)
    trial = _lowered(trials, decisions, request.budget_bytes, anchors_ahead)
    if not trial.fits:
        least_bytes = trials.least_budget(decisions)
        trial = _lowered(trials, decisions, least_bytes, anchors_ahead)
        if not trial.fits:
            raise InfeasibleBudget(request.budget_bytes, least_bytes, policy)
    kept = sum(item.can_wait for item in trials.candidates.items) - len(decisions)
    notes = (f"{kept} activations are kept because the host budget is used up",) if kept else ()
    return outcome_of(trials, trial, notes)


def _lowered(trials: Trials, decisions: dict[int, Choice], budget_bytes: int, anchors_ahead: int | None) -> Trial:
    evaluator, dataflow = trials.request.evaluator, trials.request.dataflow
    evaluation = everything_leaves(evaluator, dataflow, decisions, budget_bytes)
    if anchors_ahead is not None:
        schedule = evaluation.schedule
        late = delayed(dataflow, trips_of(schedule), anchors_ahead)
        evaluation = played(evaluator, swap_schedule(schedule, late, schedule))
    return trials.offer(trials.complete(decisions), evaluation)
