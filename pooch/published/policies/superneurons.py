"""SuperNeurons (Wang et al. 2018) as in the PoocH paper: expensive layers are swapped, cheap ones recomputed.

Procedure (read: the baseline of that name in the authors' fork of PoocH; the SuperNeurons paper itself: abstract):
1. keep maps, from the tail of the forward pass, until the next one does not fit;
2. of the others, swap the outputs of convolutions and recompute the rest (pooling, activation, normalization);
3. start copies in at the convolutions of the backward pass.

Ours: the slots of copies (as early as the budget permits); values that cannot be recomputed are swapped, and vice
versa; in networks without convolutions, matrix products and recurrent layers take their place.
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
        InfeasibleBudget: the step does not fit even if nothing is kept.
    """
    expensive = heavy_ops(request.dataflow)
    items = (item for item in Candidates(request.dataflow).items if item.can_swap or item.can_recompute)
    return fitted_outcome(request, [(item.value, _choice(item, expensive)) for item in items], "superneurons")


def _choice(item: Candidate, expensive: frozenset[int]) -> Choice:
    if item.can_swap and (item.born in expensive or not item.can_recompute):
        return "swap"
    return "recompute"
