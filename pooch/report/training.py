"""Tables and records of training under a plan, with predicted and measured values side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from ..api.measure.doubt import doubt_of_training
from ..api.measure.training_report import TrainingReport
from ..ground.units import format_bytes, format_ms, plural
from .fitting import Column, FittedTable
from .summaries import Record, for_json
from .tables import facts_table
from .verdict import training_verdict

_UNKNOWN = "-"


def training_record(report: TrainingReport) -> Record:
    """Return the report for `--json`: every field by name, and in `kept` whether all promises were kept."""
    fields = {name: for_json(value) for name, value in asdict(report).items()}
    told = {"verdict": training_verdict(report), "doubt": doubt_of_training(report)}
    return fields | {"kept": broken_promise(report) is None} | told


def training_tables(report: TrainingReport, *, verbose: bool = False) -> list[Table | FittedTable]:
    """Return two tables: peak and time; then what was done, and whether the results are the same.

    Args:
        report: the training.
        verbose: with what Pooch did inside of the step.
    """
    facts = _facts(report) | (_internals(report) if verbose else {})
    known = {name: text for name, text in facts.items() if text is not None}
    return [_measured_table(report), facts_table("", known)]


def broken_promise(report: TrainingReport) -> str | None:
    """Return the first broken promise in one line, or None if all measured promises were kept."""
    if report.bitwise_equal is False:
        under = " under deterministic algorithms" if report.compared_deterministically else ""
        told = f"the numbers are not those of plain training{under}: first difference at {report.first_difference}"
        return told + _cause(report)
    if report.arena_difference is not None and report.repeatable is not False:
        return f"the numbers on an arena are not those without: first difference at {report.arena_difference}"
    if report.steps_off_plan:
        off = f"{report.steps_off_plan} of {plural(report.steps, 'step')}"
        return (
            f"{off} were not the planned step, so the plan's promises do not hold: train with the batch size and the "
            "settings that were profiled, or profile and plan again"
        )
    if report.repeatable is False and report.bitwise_equal is None:
        told = f"the plan cannot be checked: two plain trainings differ too, first at {report.first_difference}"
        return told + _cause(report)
    if report.within_budget is False and report.budget_bytes is not None:
        peak, budget = format_bytes(report.measured_peak_bytes), format_bytes(report.budget_bytes)
        return f"the measured peak {peak} is over the budget {budget}: profile again, or plan with a smaller budget"
    if report.hard_limit_planned is not None and not report.hard_limit_planned.startswith("went through"):
        return f"planned training under the hard limit {report.hard_limit_planned}"
    if report.hard_limit_arena is not None and not report.hard_limit_arena.startswith("went through"):
        return (
            f"planned training on an arena under the hard limit {report.hard_limit_arena}. The budget bounds live "
            "bytes, and an arena may take more: `--bound arena` makes a plan whose arena is within the budget"
        )
    return None


def _measured_table(report: TrainingReport) -> FittedTable:
    names = ("plain", "predicted", "measured", "budget", "measured / plain")
    title = f"training {report.workload}, {plural(report.steps, 'step')}, plan by {report.policy}"
    table = FittedTable(title, [Column("", "word"), *map(Column, names)])
    plain_bytes = report.plain_peak_bytes
    table.add_row(
        "peak",
        _plain_peak(report),
        _bytes(report.predicted_peak_bytes),
        _bytes(report.measured_peak_bytes),
        _bytes(report.budget_bytes),
        f"{report.measured_peak_bytes / plain_bytes:.3f}" if plain_bytes else _UNKNOWN,
    )
    table.add_row(
        "step",
        _ms(report.plain_step_ms) + _range(report.plain_step_samples_ms),
        _ms(report.predicted_step_ms),
        _ms(report.measured_step_ms) + _range(report.measured_step_samples_ms),
        "",
        f"{report.slowdown:.3f}" if report.slowdown is not None else _UNKNOWN,
    )
    return table


def _plain_peak(report: TrainingReport) -> str:
    """As measured, or of the profile where plain training was not run."""
    if report.plain_peak_bytes is not None or report.in_core_peak_bytes is None:
        return _bytes(report.plain_peak_bytes)
    return f"{_bytes(report.in_core_peak_bytes)} (profile)"


def _range(samples_ms: Sequence[float]) -> str:
    """The fastest and the slowest of some steps."""
    if not samples_ms or len(samples_ms) == 1:
        return ""
    return f" ({format_ms(min(samples_ms))} to {format_ms(max(samples_ms))})"


def _facts(report: TrainingReport) -> dict[str, str | None]:
    off_plan = f"{report.steps_off_plan} of {plural(report.steps, 'step')}"
    return {
        "in-core": _in_core(report),
        "same numbers": _same_numbers(report),
        "repeatable": _repeatable(report),
        "within budget": "unknown, as steps left the plan" if report.steps_off_plan else _within_budget(report),
        "predicted slowdown": f"{report.predicted_slowdown:.3f}x" if report.predicted_slowdown is not None else None,
        "swapped": _swapped(report),
        "recomputed": f"{plural(report.recomputed_ops, 'op')} per step" if report.recomputed_ops is not None else None,
        "left the plan": None if report.mismatches is None else off_plan,
        "planned again": str(report.repairs) if report.repairs else None,
        "hard limit": _limit(report),
        "hard limit, plain": report.hard_limit_plain,
        "hard limit, planned": report.hard_limit_planned,
        "hard limit, on an arena": report.hard_limit_arena,
        "arena": report.arena,
    }


def _internals(report: TrainingReport) -> dict[str, str | None]:
    return {
        "peak error": f"{report.peak_error:+.2%}" if report.peak_error is not None else None,
        "replays compared": report.verified,
        "stalled": _ms(report.stall_ms) if report.stall_ms is not None else None,
        "reserved by the allocator": _reserved(report),
        "late swaps": None if report.late_swaps is None else str(report.late_swaps),
    }


def _within_budget(report: TrainingReport) -> str | None:
    over_bytes = report.measured_peak_bytes - (report.budget_bytes or 0)
    if report.within_budget and over_bytes > 0:
        return f"yes, except for {_bytes(over_bytes)} by which the allocator rounds blocks up"
    return _yes_or_no(report.within_budget)


def _cause(report: TrainingReport) -> str:
    return f"; {report.difference_cause}" if report.difference_cause else ""


def _same_numbers(report: TrainingReport) -> str:
    if report.bitwise_equal is None:
        return "cannot be checked" if report.repeatable is False else "not checked (--check)"
    if report.compared_deterministically:
        return "yes, bitwise, under deterministic algorithms" if report.bitwise_equal else "NO"
    than = " (compared with training that moves all saved tensors off the device, as plain training does not fit)"
    against = than if report.compared_with == "offloaded" else ""
    return ("yes, bitwise" if report.bitwise_equal else f"NO: {report.first_difference}") + against


def _in_core(report: TrainingReport) -> str | None:
    if report.fits_in_core is not False:
        return None
    peak, step = _bytes(report.in_core_peak_bytes), _ms(report.in_core_step_ms)
    return f"does not fit in-core (it takes {peak}); in-core time modelled: {step}"


def _repeatable(report: TrainingReport) -> str | None:
    if report.repeatable is False:
        at = "" if report.bitwise_equal is False else f", first at {report.first_difference}"
        return f"NO: two plain trainings differ{at}{_cause(report)}"
    return None


def _swapped(report: TrainingReport) -> str | None:
    if report.swapped_out_bytes is None:
        return None
    return f"{_bytes(report.swapped_out_bytes)} out, {_bytes(report.swapped_in_bytes)} in, per step"


def _reserved(report: TrainingReport) -> str | None:
    if report.measured_reserved_bytes is None:
        return None
    plain = report.plain_reserved_bytes
    return _bytes(report.measured_reserved_bytes) + ("" if plain is None else f" (plain: {_bytes(plain)})")


def _limit(report: TrainingReport) -> str | None:
    if report.hard_limit_slack_bytes is None:
        return None
    return f"the budget plus {_bytes(report.hard_limit_slack_bytes)} for memory other than tensors"


def _bytes(number: int | None) -> str:
    return _UNKNOWN if number is None else format_bytes(number)


def _ms(milliseconds: float | None) -> str:
    return _UNKNOWN if milliseconds is None else format_ms(milliseconds)


def _yes_or_no(value: bool | None) -> str | None:
    return None if value is None else ("yes" if value else "NO")
