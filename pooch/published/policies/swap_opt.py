"""PoocH's baseline `swap_opt` (Ito et al. 2019): the first half of its classification, keep or swap.

Procedure (read: the authors' Chainer fork):
1. swap everything, and note the maps whose copies out are not hidden behind compute;
2. walk the unhidden maps from the last to the first and keep each, until one does not fit;
3. walk all maps from the last to the first and keep each that fits.

Ours: predictions, and the slots of copies (those of the lowering: in as early as the budget permits).
"""

from __future__ import annotations

from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of
from ...planner.search.trials import Trials
from .keeping import all_swapped, keep_or_swap


def swap_opt(request: PlanningRequest) -> PolicyOutcome:
    """Keep or swap as PoocH does.

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    trials = Trials(request)
    return outcome_of(trials, keep_or_swap(trials, all_swapped(trials, "swap_opt")).trial)
