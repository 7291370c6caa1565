"""The first line of what commands print: what a person wants to know."""

from __future__ import annotations

from ..api.measure.training_report import TrainingReport
from ..ground.units import format_bytes, plural
from ..ground.wording import budget_verdict, in_all, of_budget, slower_than, slower_than_predicted
from ..ir import Plan

EVERYTHING_FITS = "everything fits: you do not need a plan"


def needs_no_plan(plan: Plan) -> bool:
    """Whether plain training is within the budget of a plan."""
    return plan.bound == "live" and plan.budget_bytes >= plan.in_core_peak_bytes > 0


def plan_verdict(plan: Plan) -> str:
    """What a plan promises: peak and time."""
    if needs_no_plan(plan):
        return EVERYTHING_FITS
    peak = format_bytes(plan.predicted_peak_bytes)
    beside = of_budget(plan.predicted_peak_bytes, plan.budget_bytes) if plan.budget_bytes else peak
    if not plan.in_core_step_ms:
        return f"Predicted: {beside}"
    return f"Predicted: {beside}; {slower_than(plan.predicted_step_ms / plan.in_core_step_ms, 'without Pooch')}"


def training_verdict(report: TrainingReport) -> str:
    """Whether the budget was held, the numbers are the same, and what it costs; only what is known."""
    parts = [_budget(report), _numbers(report), _time(report)]
    return "; ".join(part for part in parts if part)


def _budget(report: TrainingReport) -> str:
    peak, steps = format_bytes(report.measured_peak_bytes), report.steps
    if report.steps_off_plan:
        off = f"{report.steps_off_plan} of {plural(steps, 'step')} left the plan"
        return f"Budget not judged: {off}; peak {peak}"
    if report.budget_bytes is None or report.steps_over_budget is None:
        return f"Peak {peak} {in_all(steps)}"
    over = report.steps_over_budget
    return budget_verdict(report.measured_peak_bytes, report.budget_bytes, steps, over, report.rounding_bytes)


def _numbers(report: TrainingReport) -> str:
    if report.bitwise_equal is not None:
        how = " under deterministic algorithms" if report.compared_deterministically else ""
        return f"same numbers as plain training{how}" if report.bitwise_equal else f"NOT the same numbers{how}"
    if report.repeatable is False:
        return "the numbers of plain training do not repeat, so nothing is known of them"
    if report.replay_differences:
        whose = "its" if report.replay_differences == 1 else "their"
        return f"{plural(report.replay_differences, 'replay')} gave other numbers, and copies took {whose} place"
    if report.replay_differences is not None:
        return "replays gave the same numbers"
    return "" if report.predicted_peak_bytes is None else "numbers not compared (--check)"


def _time(report: TrainingReport) -> str:
    if report.slowdown is not None:
        return slower_than_predicted(report.slowdown, report.predicted_slowdown)
    if report.predicted_slowdown is not None:
        return f"predicted {slower_than(report.predicted_slowdown, 'plain steps')}, which do not fit here"
    return ""
