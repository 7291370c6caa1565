"""PoocH (Ito et al. 2019): greedy classification into keep, swap and recompute.

Procedure (read: the authors' Chainer fork, branch 3.0.0rc1-pooch):
1. swap everything, and note the maps whose copies out are not hidden behind compute;
2. walk the unhidden maps from the last to the first and keep each, until one does not fit; then walk all maps from the
   last to the first and keep each that fits (so far, this is `swap_opt`);
3. for each map still swapped: swap overhead = step - step with its copies free, recompute overhead = time of the
   replays that it adds. Maps without swap overhead, or with a ratio recompute / swap of 1 or more, stay swapped; the
   one with the smallest ratio is recomputed; repeat until none is left;
4. delay copies in as far as no stall is predicted.

A map that is kept stays kept. Ours: predictions; the slots of copies (step 4 would change neither time nor peak); in
step 3, a ratio is updated when it reaches the top and not after every change, and a change that does not fit is not
made.
"""

from __future__ import annotations

from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of
from ...planner.search.stall_rule import swap_or_recompute
from ...planner.search.trials import Trials
from .keeping import all_swapped, keep_or_swap


def pooch_2018(request: PlanningRequest) -> PolicyOutcome:
    """Classify greedily.

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    trials = Trials(request)
    current = keep_or_swap(trials, all_swapped(trials, "pooch_2018")).trial
    return outcome_of(trials, swap_or_recompute(trials, current))
