"""Meng et al. (2017), "Training deeper models by GPU memory optimization on TensorFlow": swaps by lifetime.

Procedure (read: full text):
1. walk the feature maps of the forward graph in reverse topological order, which is from the shortest lifetime to the
   longest, and give them device memory as long as there is some;
2. swap the others;
3. copy each in as late as possible without losing the overlap with compute, using a critical path over op costs.

Ours: lifetimes are measured (from the last forward use to the first backward use); the slots of copies (as early as the
budget permits, which never waits longer). The paper's rewriting of attention and recurrent cells is not a decision on
activations, and is left out.
"""

from __future__ import annotations

from ...planner.candidates import NEVER, Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from .fitting import fitted_outcome, swaps_of


def meng_lifetime(request: PlanningRequest) -> PolicyOutcome:
    """Keep what lives shortest and swap what lives longest.

    Raises:
        InfeasibleBudget: the step does not fit even if everything is swapped.
    """
    items = sorted(Candidates(request.dataflow).items, key=lambda item: (-_idle_slots(item), item.value))
    return fitted_outcome(request, swaps_of(items), "meng_lifetime")


def _idle_slots(item: Candidate) -> int:
    """Return the number of slots between the last forward use and the first backward use."""
    return (item.death if item.need == NEVER else item.need) - item.release
