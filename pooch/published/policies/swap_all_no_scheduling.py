"""PoocH's baseline `swap_all_no_scheduling` (Ito et al. 2019): swap every map, and copy in one step ahead.

Procedure (read: the authors' Chainer fork):
1. copy out every feature map when it is complete, whether or not there is room for it;
2. copy each in one step of the backward pass before the step that needs it.

The timing of copies in is the authors' (a step of the backward pass is an anchor). Ours: the slots at which values are
freed, as in `swap_all`; without room one step ahead, the copy starts when the value is needed.
"""

from __future__ import annotations

from ...planner.contract import PlanningRequest, PolicyOutcome
from .swap_all import everything_swapped


def swap_all_no_scheduling(request: PlanningRequest) -> PolicyOutcome:
    """Swap every activation, and copy each in one anchor ahead.

    Raises:
        InfeasibleBudget: that does not fit.
    """
    return everything_swapped(request, "swap_all_no_scheduling", ahead=1)
