"""The integer program with swaps alone: what the optimising swap planners would find.

Several systems choose swaps by an optimisation (among them window scheduling, Sony 2020, and the swap parts of POET
2022 and OffMate 2024; abstracts). Here: our program with recomputation forbidden. The bound is one on plans without
replays and is told in a note.
"""

from __future__ import annotations

from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.search.restricted import restricted_outcome


def ilp_swap(request: PlanningRequest) -> PolicyOutcome:
    """Keep or swap, by the integer program.

    Raises:
        InfeasibleBudget: no plan without replays was found.
    """
    return restricted_outcome(request, "swap", "ilp_swap")
