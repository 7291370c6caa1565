"""Chen, Xu, Zhang, Guestrin (2016), "Training deep nets with sublinear memory cost": checkpoints between segments.

Procedure (recalled):
1. walk the forward pass and add up the bytes of activations; whenever the sum exceeds b, keep the current activation as
   a checkpoint and start a new sum;
2. recompute everything between checkpoints when the backward pass reaches the segment;
3. search b over a grid around the square root rule (about sqrt(n) segments of n activations), and take a b whose plan
   fits.

Ours: the grid (half to twice sqrt(n) segments, in steps of sqrt(2)), and taking the fastest plan that fits. Activations
that cannot be recomputed are kept. Nothing is swapped.
"""

from __future__ import annotations

import math

from ...ground.errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.trials import Trial, Trials
from .fitting import chosen

GRID = (1.0, 2**-0.5, 2**0.5, 0.5, 2.0)  # times the square root of n


def chen_sqrt(request: PlanningRequest) -> PolicyOutcome:
    """Keep checkpoints and recompute between them.

    Raises:
        InfeasibleBudget: no number of segments in the grid fits.
    """
    return chosen(request, _fastest)


def _fastest(trials: Trials) -> Trial:
    root = math.sqrt(len(trials.candidates.items))
    tried = [between_checkpoints(trials.candidates, max(1, round(factor * root))) for factor in GRID]
    for decisions in tried:
        trials.run(decisions)
    if trials.best is None:
        for decisions in tried:
            trials.run(decisions, trials.least_budget(decisions))
    if trials.best is None:
        least_bytes = min(trials.least_budget(decisions) for decisions in tried)
        raise InfeasibleBudget(trials.request.budget_bytes, least_bytes, "chen_sqrt")
    return trials.best


def between_checkpoints(candidates: Candidates, segments: int) -> dict[int, Choice]:
    """Recompute all but the last activation of each segment; segments have about equal bytes."""
    most_bytes = sum(item.memory_bytes for item in candidates.items) / segments
    decisions: dict[int, Choice] = {}
    segment_bytes = 0
    for item in candidates.items:
        segment_bytes += item.memory_bytes
        if segment_bytes >= most_bytes:
            segment_bytes = 0
        elif item.can_recompute:
            decisions[item.value] = "recompute"
    return decisions
