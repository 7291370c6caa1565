"""SuperNeurons (Wang et al. 2018) as in the PoocH paper: expensive layers are swapped, cheap ones recomputed.

Procedure (read: the baseline of that name in the authors' fork of PoocH; the SuperNeurons paper itself: abstract):
1. with all other maps swapped, keep maps from the tail of the forward pass until the next one does not fit;
2. of the others, leave the outputs of convolutions swapped and recompute the rest (pooling, activation, normalization);
3. start copies in at the convolutions of the backward pass.

Step 1 does not look ahead to step 2: replays can need more memory than the swaps that they replace, and then there is
no plan.

Ours: the slots of copies (as early as the budget permits); values that cannot be recomputed are swapped, and vice
versa; in networks without convolutions, matrix products and recurrent layers take their place.
"""

from __future__ import annotations

from ...ir.plan import Choice
from ...planner.candidates import Candidate
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of, with_smallest_budget
from ...planner.search.trials import Trials
from .fitting import fewest_count, swaps_of
from .operators import heavy_ops


def superneurons(request: PlanningRequest) -> PolicyOutcome:
    """Keep the tail, swap convolutions, recompute the rest.

    Raises:
        InfeasibleBudget: everything swapped does not fit, or the replays need too much.
    """
    return with_smallest_budget(request, _attempt, "superneurons")


def _attempt(request: PlanningRequest) -> PolicyOutcome | None:
    trials = Trials(request)
    head = _head(trials)
    if head is None:
        return None
    expensive = heavy_ops(request.dataflow)
    trial = trials.run({item.value: _choice(item, expensive) for item in head})
    return outcome_of(trials, trial) if trial.fits else None


def _head(trials: Trials) -> list[Candidate] | None:
    """Return what leaves if as much of the tail as possible is kept and the rest swapped (step 1)."""
    swaps = swaps_of(trials.candidates.items)
    count = fewest_count(trials, swaps)
    if count is None:
        return None
    last = swaps[count - 1][0] if count else -1
    return [item for item in trials.candidates.items if item.value <= last and (item.can_swap or item.can_recompute)]


def _choice(item: Candidate, expensive: frozenset[int]) -> Choice:
    if item.can_swap and (item.born in expensive or not item.can_recompute):
        return "swap"
    return "recompute"
