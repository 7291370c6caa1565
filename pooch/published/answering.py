"""Answers a row of an experiment: profiles and plans it, and on the local device also trains it."""

from __future__ import annotations

import time
from dataclasses import replace

from ..api.batch_search.max_batch import with_measurements
from ..api.batch_search.results import MaxBatch
from ..api.batch_search.search import largest_size
from ..api.budgets import parse_budget
from ..api.measure.comparison import ComparisonRow, measure_rows
from ..api.options import PlanOptions
from ..api.planning import plan
from ..ground.errors import InfeasibleBudget
from ..ground.progress import Progress
from ..ir import Choice, Plan, Profile
from .methods import Method, find_method
from .profiles import Profiles
from .rows import Answer, Row

STEPS = 7  # trained for a measurement of throughput
TURNS = 21  # of a plain and a planned step for a measurement of a slowdown
CURVE = {"ilp": 5}  # planned sizes for each method; the two ends for other methods and for measured rows


def answer(row: Row, method_name: str, profiles: Profiles, time_limit_s: float, progress: Progress) -> Answer:
    """Answer one row with one method.

    Args:
        row: of an experiment.
        method_name: one of the row's methods.
        profiles: makes and caches profiles, which methods and rows share.
        time_limit_s: limit in seconds for each plan.
        progress: called with a description of the current work.

    Raises:
        UsageError: the method does not exist.
        PoochError: the row cannot be profiled.
    """
    started_s = time.monotonic()
    method = find_method(method_name)
    answering = {"slowdown": _slowdown, "largest": _largest}[row.question]
    found = answering(row, method, profiles, time_limit_s, progress)
    return replace(found, answered_s=round(time.monotonic() - started_s, 1))


def _start(row: Row, method: Method, profile: Profile, budget_bytes: int) -> Answer:
    return Answer(
        row=row.key,
        method=method.name,
        device=profile.device.name,
        modelled=profile.device.modelled,
        budget_bytes=budget_bytes,
        fits=False,
        in_core_step_ms=profile.step_ms,
        in_core_peak_bytes=profile.peak_bytes,
    )


def _with_plan(found: Answer, made: Plan) -> Answer:
    return replace(
        found,
        fits=True,
        step_ms=made.predicted_step_ms,
        lower_bound_ms=made.lower_bound_ms,
        peak_bytes=made.predicted_peak_bytes,
        status=made.status,
        swapped_share=_share(made, "swap"),
        recomputed_share=_share(made, "recompute"),
    )


def _share(made: Plan, choice: Choice) -> float:
    total_bytes = sum(decision.size_bytes for decision in made.choices)
    chosen_bytes = sum(decision.size_bytes for decision in made.choices if decision.choice == choice)
    return round(chosen_bytes / total_bytes, 4) if total_bytes else 0.0


def _slowdown(row: Row, method: Method, profiles: Profiles, time_limit_s: float, progress: Progress) -> Answer:
    profile = method.sees(profiles.of(row, row.batch_size))
    budget_bytes = parse_budget(row.budget, profile.peak_bytes)
    found = _start(row, method, profile, budget_bytes)
    progress(f"{row.title}: {method.name}")
    try:
        made = plan(profile, budget_bytes, policy=method.policy, time_limit_s=time_limit_s, region="step")
    except InfeasibleBudget as error:
        return replace(found, needs_bytes=error.minimum_bytes)
    found = _with_plan(found, made)
    if not row.is_measured:
        return found
    compared = ComparisonRow(budget_bytes, method.policy, made)
    (trained,) = measure_rows(
        [compared], profiles.factory(row, row.batch_size), steps=TURNS, progress=lambda text, share: progress(text)
    )
    assert trained.measured is not None, "the row has a plan"
    return replace(
        found,
        measured_peak_bytes=trained.measured.peak_bytes,
        measured_step_ms=trained.measured.step_ms,
        measured_plain_step_ms=trained.measured.plain_step_ms,
        measured_ratios=tuple(round(ratio, 4) for ratio in trained.measured.ratios),
    )


def _largest(row: Row, method: Method, profiles: Profiles, time_limit_s: float, progress: Progress) -> Answer:
    try:
        result = largest_size(
            lambda size: method.sees(profiles.of(row, size)),
            profiles.sized(row).sizes(row.most),
            row.budget,
            PlanOptions(method.policy, time_limit_s=time_limit_s, region="step"),
            start=row.start,
            points=2 if row.is_measured else CURVE.get(method.name, 2),
            progress=lambda text: progress(f"{row.title}, {method.name}: {text}"),
        )
    except InfeasibleBudget as error:
        profile = profiles.of(row, profiles.sized(row).sizes().smallest)
        return replace(_start(row, method, profile, error.budget_bytes), needs_bytes=error.minimum_bytes)
    if row.is_measured:
        result = with_measurements(result, profiles.sized(row).at, STEPS, progress)
    return _with_measurements(_of_sizes(row, method, result), result)


def _of_sizes(row: Row, method: Method, result: MaxBatch) -> Answer:
    largest, in_core = result.largest, result.in_core
    found = Answer(
        row=row.key,
        method=method.name,
        device=result.device.name,
        modelled=result.device.modelled,
        budget_bytes=result.budget_bytes,
        fits=True,
        in_core_step_ms=largest.in_core_step_ms,
        in_core_peak_bytes=largest.in_core_peak_bytes,
        largest=largest.size,
        in_core_largest=in_core.size if in_core else None,
        items_per_s=largest.items_per_s,
        in_core_items_per_s=in_core.items_per_s if in_core else None,
        curve=tuple((point.size, point.items_per_s) for point in result.curve),
        profiles=result.profiles,
        needs_bytes=result.refused[1] or None,
    )
    return _with_plan(found, largest.plan)


def _with_measurements(found: Answer, result: MaxBatch) -> Answer:
    for each in result.measured:
        if each.planned:
            found = replace(
                found,
                measured_peak_bytes=each.peak_bytes,
                measured_step_ms=each.step_ms,
                measured_items_per_s=each.items_per_s,
            )
        else:
            found = replace(found, measured_in_core_items_per_s=each.items_per_s)
    return found
