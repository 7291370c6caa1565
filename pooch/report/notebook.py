"""What a notebook shows of a profile, plan or timeline: tables of `pooch show`, and a picture, as one piece of HTML.

It loads nothing and runs nothing. Every text is escaped, and of large documents only the first rows are shown, so that
a notebook that is saved stays small.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import numpy
from rich.table import Table

from ..ground.colours import BUDGET, IN_CORE, PLANNED
from ..ground.units import format_bytes, format_ms
from ..ground.visible import one_line
from ..ir import Plan, Profile, Timeline
from . import tables
from .fitting import FittedTable

MOST_ROWS = 12
MOST_COLUMNS = 12
_LONGEST_CELL = 120  # characters
_WIDTH, _HEIGHT = 640, 150  # of a picture, in its own units
_MOST_POINTS = 320  # of a curve: every second unit of the width


def profile_html(profile: Profile) -> str:
    """`Profile._repr_html_`."""
    curve = _curve(*_in_core_curve(profile), profile.peak_bytes, profile.step_ms, IN_CORE)
    return _document([_table(tables.profile_table(profile)), curve, _table(tables.layers_table(profile))])


def plan_html(plan: Plan) -> str:
    """`Plan._repr_html_`."""
    parts = [_table(tables.plan_table(plan)), _peaks(plan), _table(tables.choices_table(plan))]
    if plan.choices:
        parts.append(_table(tables.decisions_table(plan, longest=MOST_ROWS)))
    return _document(parts)


def timeline_html(timeline: Timeline) -> str:
    """`Timeline._repr_html_`."""
    frame = timeline.memory_curve()
    times_ms, live_bytes = frame["time_ms"].to_numpy(), frame["live_bytes"].to_numpy()
    curve = _curve(times_ms, live_bytes, timeline.peak_bytes, timeline.step_ms, PLANNED)
    return _document([_table(tables.timeline_table(timeline)), curve])


def _in_core_curve(profile: Profile) -> tuple[numpy.ndarray, numpy.ndarray]:
    """When each op begins and has its peak, and the live bytes from then on."""
    durations_ms = numpy.array([op.time_ms for op in profile.ops])
    starts_ms = numpy.cumsum(durations_ms) - durations_ms
    times_ms = numpy.column_stack([starts_ms, starts_ms + durations_ms / 2]).ravel()
    live_bytes = numpy.array([(op.entry_bytes, op.peak_bytes) for op in profile.ops], dtype=float).ravel()
    return times_ms, live_bytes


def _document(parts: Iterable[str]) -> str:
    return f'<div style="font-size:90%;max-width:60em;overflow-x:auto">{"".join(parts)}</div>'


def _table(given: Table | FittedTable) -> str:
    """The first rows of a table, with what is left out in a line below it."""
    table = given.whole() if isinstance(given, FittedTable) else given
    columns = table.columns[:MOST_COLUMNS]
    rows = list(zip(*([*map(_text, column.cells)] for column in columns), strict=True))
    heads = [_text(column.header) for column in columns]
    head = f"<tr>{''.join(f'<th>{each}</th>' for each in heads)}</tr>" if table.show_header else ""
    left = [column.justify != "right" for column in columns]
    body = "".join(_row(row, left) for row in rows[:MOST_ROWS])
    more = f"<div>and {len(rows) - MOST_ROWS:,} more rows</div>" if len(rows) > MOST_ROWS else ""
    return f"<div><b>{_text(table.title)}</b></div><table>{head}{body}</table>{more}"


def _row(cells: Sequence[str], left: Sequence[bool]) -> str:
    styles = ("text-align:left" if is_left else "text-align:right;white-space:nowrap" for is_left in left)
    shown = [f'<td style="{style}">{cell}</td>' for cell, style in zip(cells, styles, strict=True)]
    return f"<tr>{''.join(shown)}</tr>"


def _text(cell: object) -> str:
    """What a cell shows, for HTML."""
    plain = "" if cell is None else str(getattr(cell, "plain", cell))
    return html.escape(one_line(plain, _LONGEST_CELL))


def _curve(times_ms: numpy.ndarray, live_bytes: numpy.ndarray, peak_bytes: int, step_ms: float, colour: str) -> str:
    """Live bytes over time as a picture: of many points, the highest of each stretch."""
    stretch = numpy.minimum(times_ms / (step_ms or 1.0) * _MOST_POINTS, _MOST_POINTS - 1).astype(int)
    highest = numpy.zeros(_MOST_POINTS)
    numpy.maximum.at(highest, stretch.clip(0), live_bytes)
    heights = _HEIGHT * (1 - _held(highest) / (peak_bytes or 1))
    points = " ".join(f"{2 * place} {height:.1f}" for place, height in enumerate(heights.tolist()))
    label = f"live memory over the step: peak {format_bytes(peak_bytes)}, {format_ms(step_ms)}"
    outline = f"M0 {_HEIGHT} L{points} L{_WIDTH} {_HEIGHT} Z"
    area = f'<path d="{outline}" fill="{colour}" fill-opacity="0.35" stroke="{colour}"/>'
    return _picture(label, area, _HEIGHT)


def _held(highest: numpy.ndarray) -> numpy.ndarray:
    """In stretches in which nothing begins, the bytes are those of the stretch before."""
    known = numpy.maximum.accumulate(numpy.where(highest > 0, numpy.arange(len(highest)), 0))
    return highest[known]


def _peaks(plan: Plan) -> str:
    """The peaks without and with the plan as bars, and the budget as a line."""
    bars = [
        ("without a plan", plan.in_core_peak_bytes, IN_CORE),
        ("under the plan", plan.predicted_peak_bytes, PLANNED),
    ]
    longest = max(plan.in_core_peak_bytes, plan.predicted_peak_bytes, plan.budget_bytes) or 1
    parts = [_bar(place, *bar, longest) for place, bar in enumerate(bars)]
    if plan.budget_bytes:
        place = plan.budget_bytes / longest * _WIDTH
        parts.append(f'<path d="M{place:.1f} 0 V60" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="5 3"/>')
    budget = f", budget {format_bytes(plan.budget_bytes)} (dashed)" if plan.budget_bytes else ""
    peaks = ", ".join(f"{format_bytes(size_bytes)} {name}" for name, size_bytes, _ in bars)
    return _picture(f"peaks: {peaks}{budget}", "".join(parts), 60)


def _bar(place: int, name: str, size_bytes: int, colour: str, longest: int) -> str:
    width = size_bytes / longest * _WIDTH
    bar = f'<rect x="0" y="{place * 30 + 4}" width="{width:.1f}" height="22" fill="{colour}" fill-opacity="0.45"/>'
    return f'{bar}<text x="6" y="{place * 30 + 20}" font-size="13" fill="currentColor">{html.escape(name)}</text>'


def _picture(label: str, parts: str, height: int) -> str:
    text = html.escape(label)
    return (
        f'<div style="margin:0.5em 0"><svg role="img" aria-label="{text}" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" style="max-width:100%">{parts}</svg><div>{text}</div></div>'
    )
