"""The comparison as a picture: time against memory, one line per policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measure.comparison import ComparisonRow
from ..units import format_bytes
from .colours import IN_CORE, PLANNED

# Of the other policies; where colours repeat, markers tell them apart.
_COLOURS = ("#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F", "#555555")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">")
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Series:
    """What one policy achieves: (peak in bytes, slowdown) under each budget, by ascending peak."""

    policy: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ParetoPicture:
    """Time against memory.

    Attributes:
        series: of policies that fit into at least one budget.
        budgets_bytes: asked for, ascending.
        bounds: (budget, lowest possible slowdown) from the integer program.
        in_core_bytes: the in-core peak.
        missing: policies that fit into none of the budgets.
        title: for people.
    """

    series: tuple[Series, ...]
    budgets_bytes: tuple[int, ...]
    bounds: tuple[tuple[int, float], ...]
    in_core_bytes: int
    missing: tuple[str, ...]
    title: str


def pareto_picture(rows: Iterable[ComparisonRow], title: str) -> ParetoPicture:
    """Collect what the figure shows."""
    rows = list(rows)
    points: dict[str, list[tuple[int, float]]] = {row.policy: [] for row in rows}
    bounds = {}
    in_core_bytes = 0
    for row in rows:
        if row.plan is not None and row.plan.in_core_step_ms > 0:
            in_core_bytes = row.plan.in_core_peak_bytes
            points[row.policy].append((row.plan.predicted_peak_bytes, _slowdown(row.plan.predicted_step_ms, row)))
            if row.policy == "ilp":
                bounds[row.budget_bytes] = _slowdown(row.plan.lower_bound_ms, row)
    return ParetoPicture(
        series=tuple(Series(policy, tuple(sorted(found))) for policy, found in points.items() if found),
        budgets_bytes=tuple(sorted({row.budget_bytes for row in rows})),
        bounds=tuple(sorted(bounds.items())),
        in_core_bytes=in_core_bytes,
        missing=tuple(policy for policy, found in points.items() if not found),
        title=title,
    )


def _slowdown(step_ms: float, row: ComparisonRow) -> float:
    assert row.plan is not None
    return step_ms / row.plan.in_core_step_ms


def draw_pareto(picture: ParetoPicture) -> Figure:
    """Peak memory to the right, slowdown upwards: better plans are closer to the lower left corner."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots()
    scale, unit = (_GIB, "GiB") if picture.in_core_bytes >= 2 * _GIB else (_MIB, "MiB")
    _draw_budgets(axes, picture, scale)
    for place, series in enumerate(each for each in picture.series if each.policy != "ilp"):
        _draw_series(axes, series, scale, _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])
    if picture.bounds:
        budgets = [budget_bytes / scale for budget_bytes, _ in picture.bounds]
        bounds = [(bound - 1) * 100 for _, bound in picture.bounds]
        axes.plot(budgets, bounds, color=PLANNED, linestyle=":", marker="_", linewidth=1.2, label="lower bound")
    for series in picture.series:
        if series.policy == "ilp":
            _draw_series(axes, series, scale, PLANNED, "*", width=2.4, size=13)
    _finish(axes, picture, unit)
    return figure


def _draw_budgets(axes: Axes, picture: ParetoPicture, scale: int) -> None:
    place = axes.get_xaxis_transform()
    for budget_bytes in picture.budgets_bytes:
        axes.axvline(budget_bytes / scale, color=IN_CORE, linestyle="--", linewidth=0.8, zorder=0)
        told = f" {budget_bytes / picture.in_core_bytes:.0%}" if picture.in_core_bytes else ""
        axes.text(budget_bytes / scale, 1.0, told, ha="center", va="bottom", fontsize=8, transform=place)


def _draw_series(
    axes: Axes, series: Series, scale: int, colour: str, marker: str, *, width: float = 0.9, size: float = 5.5
) -> None:
    peaks = [peak_bytes / scale for peak_bytes, _ in series.points]
    slowdowns = [(slowdown - 1) * 100 for _, slowdown in series.points]
    axes.plot(
        peaks, slowdowns, color=colour, marker=marker, linewidth=width, markersize=size, alpha=0.9, label=series.policy
    )


def _finish(axes: Axes, picture: ParetoPicture, unit: str) -> None:
    axes.set_title(f"{picture.title}\n", loc="left", fontsize=11)
    axes.set_xlabel(f"predicted peak ({unit}); dashed: budgets, as shares of {format_bytes(picture.in_core_bytes)}")
    axes.set_ylabel("predicted time lost (% of the in-core step)")
    lost = [(slowdown - 1) * 100 for series in picture.series for _, slowdown in series.points]
    lowest = max(0.1, min((each for each in lost if each > 0), default=1.0) / 2)
    highest = max([1.0, *lost])
    axes.set_yscale("symlog", linthresh=lowest, linscale=0.3)
    known = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    ticks = [0, *(tick for tick in known if lowest <= tick <= 2 * highest)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.1 * lowest, highest * 1.25)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    told = sorted(zip(labels, handles, strict=True), key=lambda pair: (pair[0] != "ilp", pair[0] != "lower bound"))
    title = "fits nowhere: " + ", ".join(picture.missing) if picture.missing else None
    legend = axes.legend(
        [handle for _, handle in told], [label for label, _ in told], loc="upper left", bbox_to_anchor=(1.01, 1.0),
        fontsize=8.5, frameon=False, title=title, title_fontsize=8,
    )  # fmt: skip
    legend.set_alignment("left")
