"""SuperNeurons (Wang et al. 2018), as the PoocH paper compares with it: dear layers swap, cheap ones are recomputed.

Procedure (read: the baseline of that name in the authors' fork of PoocH; the SuperNeurons paper itself: abstract):
1. keep maps from the tail of the forward pass on, until the next one does not fit;
2. of the others, outputs of convolutions swap and all others (pooling, activation, normalisation) are recomputed;
3. copies in are started at the convolutions of the backward pass.

Ours: the slots of copies (as early as the budget permits), swap where a value cannot be recomputed and
recompute where it cannot be swapped, and what stands for a convolution in networks that have none (matrix products,
recurrent layers).
"""

from __future__ import annotations

from ...ir.plan import Choice
from ...planner.candidates import Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from .fitting import fitted_outcome
from .operators import heavy_ops


def superneurons(request: PlanningRequest) -> PolicyOutcome:
    """Keep the tail, swap convolutions, recompute the rest.

    Raises:
        InfeasibleBudget: it does not fit even if nothing is kept.
    """
    dear = heavy_ops(request.dataflow)
    items = (item for item in Candidates(request.dataflow).items if item.can_swap or item.can_recompute)
    return fitted_outcome(request, [(item.value, _choice(item, dear)) for item in items], "superneurons")


def _choice(item: Candidate, dear: frozenset[int]) -> Choice:
    if item.can_swap and (item.born in dear or not item.can_recompute):
        return "swap"
    return "recompute"
