"""Tuning TFLMS's parameters (Imai et al. 2018/19): run the step with many of them and keep the fastest.

Procedure (abstract; the parameters are TFLMS's, read): sweep the number of swapped tensors (`n_tensors`), the number of
levels by which copies in start before their reader (`lb`) and how these are counted, swaps within the forward pass
(`swap_branches`: the long skips), and which path is swapped (selective swapping of the analysis path); take what runs
fastest on the machine.

Ours: the simulator replaces the machine; the grid (shares between as few as fit and all, powers of two levels ahead);
the levels are swept with as few tensors as fit, then the number of tensors, both with and without branches. Tensors
are counted from the input, so the analysis path alone is one of these numbers; it ends at the last activation with the
smallest extents, and networks without extents have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of, with_smallest_budget
from ...planner.search.trials import Trial, Trials
from .tflms import TRIGGERS, Tflms

AHEAD = tuple(2**power for power in range(9))  # levels
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the tensors that do not have to leave


@dataclass(frozen=True, slots=True)
class _Tried:
    """Parameters and their plan; `rank` orders plans that fit before those that do not."""

    parameters: Tflms
    trial: Trial

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller is better."""
        return not self.trial.fits, *self.trial.rank


def tflms_tuned(request: PlanningRequest) -> PolicyOutcome:
    """Sweep the parameters in the simulator, and take the fastest.

    Raises:
        InfeasibleBudget: swapping everything is not enough.
    """
    return with_smallest_budget(request, _attempt, "tflms_tuned")


def _attempt(request: PlanningRequest) -> PolicyOutcome | None:
    trials = Trials(request)
    best = min((_swept(trials, branches) for branches in (False, True)), key=lambda each: each.rank)
    return outcome_of(trials, best.trial) if best.trial.fits else None


def _swept(trials: Trials, branches: bool) -> _Tried:
    """Sweep the levels, then the number of tensors."""
    grid = [Tflms(lb=levels, trigger=trigger, swap_branches=branches) for trigger in TRIGGERS for levels in AHEAD]
    ahead = min((_Tried(each, each.planned(trials)) for each in grid), key=lambda each: each.rank)
    if not ahead.trial.fits:
        return ahead
    least, most = ahead.trial.decisions, len(trials.candidates.items)
    fewest = sum(choice == "swap" for choice in least.values())
    counts = {fewest + round(share * (most - fewest)) for share in SHARES} | {analysis_path(trials.candidates)}
    more = [replace(ahead.parameters, n_tensors=count) for count in sorted(counts) if count > fewest]
    return min((ahead, *(_Tried(each, each.planned(trials)) for each in more)), key=lambda each: each.rank)


def analysis_path(candidates: Candidates) -> int:
    """Return how many activations lie before the way up begins; 0 without extents."""
    values = candidates.dataflow.profile.values
    extents = [math.prod(values[item.value].shape[2:]) for item in candidates.items if item.can_wait]
    with_extent = [extent for extent in extents if extent > 1]
    if not with_extent or min(with_extent) == max(with_extent):
        return 0
    smallest = min(with_extent)
    return max(place for place, extent in enumerate(extents) if extent == smallest) + 1
