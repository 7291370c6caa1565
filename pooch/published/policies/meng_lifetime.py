"""Meng et al. (2017), "Training deeper models by GPU memory optimization on TensorFlow": swaps by lifetime.

Procedure (read: full text):
1. walk the feature maps of the forward graph in reverse topological order, so those that live shortest come first, and
   give them device memory as long as there is some;
2. swap the others, which live longest;
3. copy each in as late as its copy still overlaps with compute, by a critical path over op costs.

Ours: lifetimes are measured (from the last forward use to the first backward use); the slots of copies (as early as the
budget permits, which never waits longer). The paper's rewriting of attention and recurrent cells is no decision on
activations and is left out.
"""

from __future__ import annotations

from ...planner.candidates import NEVER, Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from .fitting import fitted_outcome, swaps_of


def meng_lifetime(request: PlanningRequest) -> PolicyOutcome:
    """Keep what lives shortest, swap what lives longest.

    Raises:
        InfeasibleBudget: it does not fit even if everything is swapped.
    """
    items = sorted(Candidates(request.dataflow).items, key=lambda item: (-_idle_slots(item), item.value))
    return fitted_outcome(request, swaps_of(items), "meng_lifetime")


def _idle_slots(item: Candidate) -> int:
    """Slots between the last use in the forward pass and the first in the backward pass."""
    return (item.death if item.need == NEVER else item.need) - item.release
