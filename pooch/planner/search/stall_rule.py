"""A rule that asks the simulator at each step: swap all, keep what stalls, recompute what costs more to swap.

This is the classification of PoocH (Ito et al. 2019), with our simulator.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import replace

from ...ir.plan import Choice
from ...ir.schedule import Schedule
from ..candidates import Candidate
from ..contract import Evaluator
from .trials import Trial, Trials

MOST = 600  # activations; each takes several evaluations


def classify_by_stalls(trials: Trials) -> None:
    """Try the classification on all swaps, where they fit; not with more than `MOST` activations."""
    if len(trials.candidates.items) > MOST:
        return
    start = trials.run(swaps_within_tier(trials))
    if start.fits:
        swap_or_recompute(trials, keep_or_swap(trials, start))


def keep_or_swap(trials: Trials, start: Trial) -> Trial:
    """Of the swapped values keep first those that make compute wait, then any that still fit."""
    stalling = unhidden(trials.request.evaluator, start.evaluation.schedule)
    current = keep_from_the_last(trials, start, stalling, stop_at_first=True)
    return keep_from_the_last(trials, current, current.evaluation.schedule.swapped)


def swaps_within_tier(trials: Trials) -> dict[int, Choice]:
    """Swap all that can wait for the backward pass, in forward order, as long as the host budget lasts."""
    left = trials.request.host_budget_bytes
    decisions: dict[int, Choice] = {}
    for item in trials.candidates.items:
        if item.can_wait and (left is None or item.size_bytes <= left):
            decisions[item.value] = "swap"
            left = None if left is None else left - item.size_bytes
    return decisions


def unhidden(evaluator: Evaluator, schedule: Schedule, kinds: tuple[str, ...] = ("free", "wait")) -> list[int]:
    """Values whose copies make compute wait, ascending; `kinds`: "free" (out), "wait" (in)."""
    placed = {(action.slot, action.target): action.kind for action in schedule.actions if action.kind in kinds}
    stalls = (interval for interval in evaluator.play(schedule).intervals if interval.kind == "stall")
    return sorted({stall.target for stall in stalls if (stall.slot, stall.target) in placed})


def keep_from_the_last(trials: Trials, start: Trial, values: Iterable[int], *, stop_at_first: bool = False) -> Trial:
    """Step 2: walk the values last first; keep each that the budget then still holds.

    With `stop_at_first`, the walk ends at the first that does not fit.
    """
    decisions = {value: choice for value, choice in start.decisions.items() if choice == "swap"}
    current = start
    for value in sorted(values, reverse=True):
        fewer = {kept: choice for kept, choice in decisions.items() if kept != value}
        trial = trials.fitting(fewer)
        if trial is not None:
            decisions, current = fewer, trial
        elif stop_at_first:
            break
    return current


def swap_or_recompute(trials: Trials, start: Trial) -> Trial:
    """Step 3: turn swaps into replays, the one with the smallest ratio of overheads first, until no ratio is below 1.

    A change moves the ratios of the others; each is taken again when it comes to the top.
    """
    current = start
    waiting: list[tuple[float, int]] = []
    for item in trials.candidates.items:
        if trials.request.remaining_s() <= 0:
            break
        _push(waiting, _ratio(trials, current, item), item.value)
    by_value = {item.value: item for item in trials.candidates.items}
    while waiting and trials.request.remaining_s() > 0:
        _, value = heapq.heappop(waiting)
        ratio = _ratio(trials, current, by_value[value])
        if waiting and ratio > waiting[0][0]:
            _push(waiting, ratio, value)
        elif ratio < 1:
            trial = trials.run(current.decisions | {value: "recompute"})
            current = trial if trial.fits else current
    return current


def _push(waiting: list[tuple[float, int]], ratio: float, value: int) -> None:
    if ratio < 1:
        heapq.heappush(waiting, (ratio, value))


def _ratio(trials: Trials, current: Trial, item: Candidate) -> float:
    """Overhead of recomputing over that of swapping; infinite where the swap costs nothing or there is no choice."""
    if current.decisions[item.value] != "swap" or not item.can_recompute:
        return math.inf
    without = _without_copies(current.evaluation.schedule, item.value)
    swap_ms = current.step_ms - trials.request.evaluator.time_ms(without)
    if swap_ms <= 1e-9:
        return math.inf
    candidates = trials.candidates
    replayed = candidates.least_ms(current.decisions | {item.value: "recompute"})
    return (replayed - candidates.least_ms(current.decisions)) / swap_ms


def _without_copies(schedule: Schedule, value: int) -> Schedule:
    """The same step with the copies of one value free of cost (only its time means anything)."""
    kinds = ("copy_out", "free", "copy_in", "wait")
    return replace(schedule, actions=tuple(a for a in schedule.actions if a.target != value or a.kind not in kinds))
