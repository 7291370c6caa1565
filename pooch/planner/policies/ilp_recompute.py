"""The integer program with recomputation alone: what Checkmate (Jain et al. 2019) and its successors would find.

Checkmate (abstract; its code recalled) chooses which values are recomputed when, optimally under a budget, with O(T^2)
binaries. Here: our program with swaps forbidden. Ours are the slots of replays (each value once, at its first
need), where Checkmate may compute a value several times. The bound is one on plans without swaps and is told in a note.
"""

from __future__ import annotations

from pooch.planner.contract import PlanningRequest, PolicyOutcome
from pooch.planner.search.restricted import restricted_outcome


def ilp_recompute(request: PlanningRequest) -> PolicyOutcome:
    """Keep or recompute, by the integer program.

    Raises:
        InfeasibleBudget: no plan without swaps was found.
    """
    return restricted_outcome(request, "recompute", "ilp_recompute")
