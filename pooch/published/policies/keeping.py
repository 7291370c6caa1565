"""Shared by PoocH's methods: swap everything, then keep maps one by one.

What is swapped here are decisions: the lowering may still let a map stay for which there happens to be room. When
another map is kept, that room may be gone, so a map stays decided until the method keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.plan import Choice
from ...planner.search.outcomes import fixed_trial
from ...planner.search.stall_rule import swaps_within_tier, unhidden
from ...planner.search.trials import Trial, Trials

COPIES_OUT = ("free",)  # compute waits for the bytes of a map that is being copied out
COPIES_IN = ("wait",)  # compute waits for a map that it reads


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
    trial = trials.fitting(decisions)
    return None if trial is None else Swapped(swaps, trial)


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
