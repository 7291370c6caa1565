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

from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import leanest_trial
from ...planner.search.trials import Trial, Trials
from .fitting import chosen, end_slot, fewest_leaving, swaps_of


def meng_lifetime(request: PlanningRequest) -> PolicyOutcome:
    """Keep what lives shortest and swap what lives longest.

    Raises:
        InfeasibleBudget: the step does not fit even if everything is swapped.
    """
    return chosen(request, _longest_lifetimes_first)


def _longest_lifetimes_first(trials: Trials) -> Trial:
    """Let as few leave as the budget requires, beginning with those that lie idle for the most slots."""
    items = sorted(trials.candidates.items, key=lambda item: (item.release - end_slot(item), item.value))
    leaving = swaps_of(items)
    return fewest_leaving(trials, leaving) or leanest_trial(trials, dict(leaving), "meng_lifetime")
