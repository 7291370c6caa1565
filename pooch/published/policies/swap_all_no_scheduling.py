"""PoocH's baseline `swap_all_no_scheduling` (Ito et al. 2019): every map leaves and comes back one step ahead.

Procedure (read: the authors' Chainer fork):
1. every feature map is copied out when it is complete, whether or not there is room for it;
2. each is copied in one step of the backward pass before the one that needs it.

Theirs is also the timing of the copies in (a step of the backward pass is an anchor). Ours: the slots at which values
are freed, as in `swap_all`; where there is no room one step ahead, the copy starts at the need itself.
"""

from __future__ import annotations

from ...planner.contract import PlanningRequest, PolicyOutcome
from .swap_all import everything_swapped


def swap_all_no_scheduling(request: PlanningRequest) -> PolicyOutcome:
    """Swap every activation; each comes back one anchor ahead.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return everything_swapped(request, "swap_all_no_scheduling", anchors_ahead=1)
