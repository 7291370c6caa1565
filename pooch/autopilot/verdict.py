"""The first line of a summary: what a person wants to know of all steps so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..units import format_bytes, plural
from ..wording import budget_verdict, in_all, slower_than_predicted

if TYPE_CHECKING:
    from .summary import AutoSummary

THIRD = 4 / 3  # by which times may differ from their prediction
FEW = 3  # steps, of which the first compare replays in full


def verdict(summary: AutoSummary) -> str:
    """Whether the budget was held, the numbers are the same, and what it costs; only what is known."""
    if not summary.steps:
        return "no step was run under the budget"
    return "; ".join(part for part in (_budget(summary), _numbers(summary), _time(summary)) if part)


def _budget(summary: AutoSummary) -> str:
    budget_bytes, steps = summary.budget_bytes, summary.steps
    if budget_bytes is None:
        return f"Budget not known yet: peak {format_bytes(summary.peak_bytes)} {in_all(steps)}"
    held = budget_verdict(summary.peak_bytes, budget_bytes, steps, summary.steps_over_budget)
    if summary.between_peak_bytes > budget_bytes:
        over = format_bytes(summary.between_peak_bytes - budget_bytes)
        held += f", but passed by {over} between them, as in optimizer.step()"
    return held


def _numbers(summary: AutoSummary) -> str:
    verified, differences = summary.verified, summary.verified.differences
    if differences:
        return f"{plural(len(differences), 'replay')} gave other numbers"
    if verified.compared or verified.sampled:
        return "replays gave the same numbers"
    return "replays not compared" if summary.recomputed_ops else ""


def _time(summary: AutoSummary) -> str:
    if summary.steps_in_core == summary.steps:
        return "everything fits: you do not need a plan"
    if not summary.plain_ms_on_plan:
        return "" if summary.steps_on_plan else "no step on a plan yet"
    ratio = summary.ms_on_plan / summary.plain_ms_on_plan
    predicted = summary.predicted_ms_on_plan / summary.plain_ms_on_plan
    return f"steps on a plan {slower_than_predicted(ratio, predicted)}"


def doubt(summary: AutoSummary) -> str | None:
    """Why the times of steps on a plan are not to be trusted, in one line, or None."""
    if summary.steps_on_plan < FEW or not summary.predicted_ms_on_plan:
        return None
    ratio = summary.ms_on_plan / summary.predicted_ms_on_plan
    if max(ratio, 1 / ratio) < THIRD:
        return None
    when = "was busy when the step was recorded" if ratio < 1 else "is busy"
    return f"times vary: steps on a plan took {ratio:.1f}x what was predicted, so the machine {when}"
