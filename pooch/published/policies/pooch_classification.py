"""PoocH (Ito et al. 2019): greedy classification into keep and swap, which is its baseline `swap_opt`, and recompute.

Procedure (read: the authors' Chainer fork, branch 3.0.0rc1-pooch):
1. swap everything, and note the maps whose copies out are not hidden behind compute;
2. walk the unhidden maps from the last to the first and keep each, until one does not fit; then walk all maps from the
   last to the first and keep each that fits (so far, this is `swap_opt`);
3. for each map still swapped: swap overhead = step - step with its copies free, recompute overhead = time of the
   replays that it adds. Maps without swap overhead, or with a ratio recompute / swap of 1 or more, stay swapped; the
   one with the smallest ratio is recomputed; repeat until none is left;
4. delay copies in as far as no stall is predicted.

A map that is kept stays kept. Ours: predictions; the slots of copies (those of the lowering: in as early as the budget
permits; step 4 would change neither time nor peak); in step 3, a ratio is updated when it reaches the top and not after
every change, and a change that does not fit is not made.

What is swapped here are decisions: the lowering may still let a map stay for which there happens to be room. When
another map is kept, that room may be gone, so a map stays decided until the method keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.plan import Choice
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import fixed_trial
from ...planner.search.stall_rule import swap_or_recompute, swaps_within_tier, unhidden
from ...planner.search.trials import Trial, Trials
from .fitting import chosen

COPIES_OUT = ("free",)  # compute waits for the bytes of a map that is being copied out
COPIES_IN = ("wait",)  # compute waits for a map that it reads


def swap_opt(request: PlanningRequest) -> PolicyOutcome:
    """Keep or swap as PoocH does (steps 1 and 2).

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    return chosen(request, lambda trials: keep_or_swap(trials, all_swapped(trials, "swap_opt")).trial)


def pooch_2018(request: PlanningRequest) -> PolicyOutcome:
    """Classify greedily.

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    return chosen(
        request,
        lambda trials: swap_or_recompute(trials, keep_or_swap(trials, all_swapped(trials, "pooch_2018")).trial),
    )


@dataclass(frozen=True, slots=True)
class Swapped:
    """Maps that are decided to be swapped, the others being kept, and their plan."""

    swaps: frozenset[int]
    trial: Trial


def all_swapped(trials: Trials, policy: str) -> Swapped:
    """Swap everything for which the tier has room: the start of PoocH's methods.

    Raises:
        InfeasibleBudget: that does not fit, so these methods have no plan.
    """
    decisions = swaps_within_tier(trials)
    return Swapped(frozenset(decisions), fixed_trial(trials, decisions, policy))


def keeping(trials: Trials, current: Swapped, value: int) -> Swapped | None:
    """Return the plan in which this map is kept, too, or None if that does not fit."""
    swaps = current.swaps - {value}
    decisions: dict[int, Choice] = dict.fromkeys(sorted(swaps), "swap")
    if not trials.might_fit(decisions):
        return None
    trial = trials.run(decisions)
    return Swapped(swaps, trial) if trial.fits else None


def keep_from_the_last(
    trials: Trials, current: Swapped, values: Iterable[int], *, stop_at_first: bool = False
) -> Swapped:
    """Walk these maps from the last to the first and keep each that fits, or until one does not."""
    for value in sorted(current.swaps.intersection(values), reverse=True):
        kept = keeping(trials, current, value)
        if kept is not None:
            current = kept
        elif stop_at_first:
            break
    return current


def keep_or_swap(trials: Trials, start: Swapped) -> Swapped:
    """Keep the maps with unhidden copies out, from the last to the first until one does not fit, then all that fit."""
    current = keep_from_the_last(trials, start, unhidden_of(trials, start, COPIES_OUT), stop_at_first=True)
    return keep_from_the_last(trials, current, current.swaps)


def unhidden_of(trials: Trials, current: Swapped, kinds: tuple[str, ...]) -> frozenset[int]:
    """Return the maps whose copies make compute wait."""
    return frozenset(unhidden(trials.request.evaluator, current.trial.evaluation.schedule, kinds))
