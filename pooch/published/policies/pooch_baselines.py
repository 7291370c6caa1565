"""Baselines of the PoocH paper (Ito et al. 2019) that decide nothing: recompute everything, or swap everything.

Procedure of `swap_all` and `swap_all_no_scheduling` (read: the authors' Chainer fork):
1. copy out every feature map when it is complete, whether or not there is room for it;
2. `swap_all`: hoist the copies in, in order of need, to the earliest step from which on the budget holds;
   `swap_all_no_scheduling`: copy each in one step of the backward pass before the step that needs it.

Ours: values that have to leave are freed at the slot that the lowering names (PoocH: when the copy ends). Values for
which there is room are copied out and back all the same. Under a host budget, which PoocH does not have, later
activations stay. The timing of the copies in without scheduling is the authors' (a step of the backward pass is an
anchor); without room one step ahead, the copy starts when the value is needed. `recompute_all` decides on single
values.
"""

from __future__ import annotations

from functools import partial

from ...ground.errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import fixed_outcome, outcome_of
from ...planner.search.stall_rule import swaps_within_tier
from ...planner.search.trials import Trial, Trials
from .timing import anchors_ahead, everything_leaves, played_from


def recompute_all(request: PlanningRequest) -> PolicyOutcome:
    """Recompute every activation that can be recomputed, and keep the others.

    The first replay of the backward pass then begins at the first value that could not be dropped, and holds everything
    that it makes on the way: this is slow, and may need much memory.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return fixed_outcome(request, Candidates(request.dataflow).all_of("recompute"), "recompute_all")


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
        evaluation = played_from(evaluator, dataflow, evaluation.schedule, anchors_ahead(dataflow, ahead))
    return trials.offer(trials.complete(decisions), evaluation)


swap_all = partial(everything_swapped, policy="swap_all")
swap_all_no_scheduling = partial(everything_swapped, policy="swap_all_no_scheduling", ahead=1)
