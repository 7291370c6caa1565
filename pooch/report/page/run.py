"""The page of a run under `pooch.auto`: what happened, the kinds of steps, and each plan as `pooch report` shows it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...autopilot.summary import AutoSummary, PlannedShape
from ...ground.units import format_bytes
from ...ground.wording import slower_than
from ...ir import Plan, Profile
from ...ir.files import replace_file
from ..summaries import Record
from .budgets import BudgetPlans
from .contents import page_contents
from .writing import NOTHING_LOADED, charted_page, digests, framed_page, plotly_source, resource

_UNKNOWN = "–"  # noqa: RUF001 - a dash in a table
_LOADED_AGAIN = '<noscript><meta http-equiv="refresh" content="3"></noscript>\n'
_RELOAD_BUTTON = '<button type="button" id="reload"></button>'
_STILL_RUNNING = (
    '  <p class="hint">Still running: this page loads itself again. The plans and their charts come at the end.</p>\n'
)
_HEADS = ("Shapes", "Steps", "Run now", "Plain peak", "Planned peak", "Planned time", "Known from", "Remarks")


def write_run_report(
    summary: AutoSummary,
    planned: Sequence[tuple[str, Profile, Plan]],
    path: str | Path,
    *,
    title: str,
    command: str = "",
) -> None:
    """Write what happened under a budget as one HTML file that needs no network.

    Args:
        summary: What happened.
        planned: Shapes, profile and plan of each kind of step that has a plan.
        path: The file to write.
        title: What was run.
        command: What the page is written by.

    Raises:
        UsageError: There is a plan, and plotly is not installed.
        FileFormatError: The file cannot be written.
    """
    title = f"Run of {title}"
    if planned:
        run = _run(summary) + _choice()
        pages = [_page(*each) for each in planned]
        text = charted_page(title, str(pages[0]["summary"]), {"pages": pages}, plotly_source(), run, command=command)
    else:
        text = framed_page(title, _run(summary), command=command)
    replace_file(path, text.encode())


def write_live_report(summary: AutoSummary, path: str | Path, *, title: str, command: str = "") -> None:
    """Write what has happened so far as a page that a browser loads again every few seconds; it has no charts yet.

    Args:
        summary: What happened so far.
        path: The file to write.
        title: What is run.
        command: What the page is written by.

    Raises:
        FileFormatError: The file cannot be written.
    """
    script = resource("live.js")
    text = framed_page(
        f"Run of {title}",
        _STILL_RUNNING + _run(summary),
        policy=f"{NOTHING_LOADED}; script-src {digests(script)}",
        head=_LOADED_AGAIN,
        controls=_RELOAD_BUTTON,
        scripts=f"<script>{script}</script>\n",
        command=command,
    )
    replace_file(path, text.encode())


def _page(shapes: str, profile: Profile, plan: Plan) -> Record:
    contents = page_contents(profile.variant(plan.splits), BudgetPlans((plan,), 0, ()))
    plans = contents["plans"]
    assert isinstance(plans, list)
    return {**contents, "name": shapes, "summary": plans[0]["summary"]}


def _run(summary: AutoSummary) -> str:
    """What happened, and the table of the kinds of steps."""
    lines = (f"    <p>{html.escape(line)}</p>" for line in replace(summary, is_verbose=True).totals)
    parts = ["  <section>\n    <h2>What happened</h2>", *lines]
    parts += ["  </section>\n  <section>\n    <h2>Kinds of steps</h2>", _table(_HEADS, map(_row, summary.shapes))]
    if summary.events:
        items = (f"      <li>{html.escape(event)}</li>" for event in summary.events)
        parts += ["    <h2>Planning</h2>", '    <ul class="notes">', *items, "    </ul>"]
    return "\n".join([*parts, "  </section>\n"])


def _row(shape: PlannedShape) -> tuple[str, ...]:
    slowdown = shape.predicted_slowdown
    return (
        shape.shapes,
        f"{shape.steps:,}",
        shape.decision,
        _bytes(shape.in_core_peak_bytes),
        _bytes(shape.predicted_peak_bytes),
        _UNKNOWN if slowdown is None else slower_than(slowdown, "plain steps"),
        shape.origin,
        shape.reason,
    )


def _bytes(size_bytes: int | None) -> str:
    return _UNKNOWN if size_bytes is None else format_bytes(size_bytes)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ['    <div class="table-frame" tabindex="0" role="region" aria-label="Kinds of steps">', "    <table>"]
    lines.append("      <tr>" + "".join(f'<th scope="col">{html.escape(head)}</th>' for head in heads) + "</tr>")
    lines += ["      <tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "    </table>", "    </div>"])


def _choice() -> str:
    return '  <section>\n    <label>Plan for steps of <select id="pages"></select></label>\n  </section>\n'
