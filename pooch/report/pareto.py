"""The comparison as a picture: time against memory, one line per policy."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..ir import Plan
from ..measure.comparison import ComparisonRow
from ..units import format_bytes
from .colours import IN_CORE, PLANNED

# Of the other policies; where colours repeat, markers tell them apart.
_COLOURS = ("#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D1F", "#555555")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">")
_GIB, _MIB = 2**30, 2**20

Point = tuple[float, float]  # peak in the unit of the picture, and time lost in percent


def draw_pareto(rows: Iterable[ComparisonRow], title: str) -> Figure:
    """Peak memory to the right, time lost upwards: better plans are closer to the lower left corner."""
    rows = list(rows)
    plans = [(row, row.plan) for row in rows if row.plan is not None and row.plan.in_core_step_ms > 0]
    in_core_bytes = plans[-1][1].in_core_peak_bytes if plans else 0
    scale, unit = (_GIB, "GiB") if in_core_bytes >= 2 * _GIB else (_MIB, "MiB")
    points: dict[str, list[Point]] = {row.policy: [] for row in rows}
    bounds: dict[int, Point] = {}  # by budget; of the integer program
    for row, plan in plans:
        points[row.policy].append((plan.predicted_peak_bytes / scale, _lost(plan, plan.predicted_step_ms)))
        if row.policy == "ilp":
            bounds[row.budget_bytes] = row.budget_bytes / scale, _lost(plan, plan.lower_bound_ms)
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots()
    _draw_budgets(axes, sorted({row.budget_bytes for row in rows}), in_core_bytes, scale)
    shown = {policy: sorted(found) for policy, found in points.items() if found}
    for place, policy in enumerate(policy for policy in shown if policy != "ilp"):
        _draw_series(axes, policy, shown[policy], _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])
    if bounds:
        at, lost = zip(*sorted(bounds.values()), strict=True)
        axes.plot(at, lost, color=PLANNED, linestyle=":", marker="_", linewidth=1.2, label="lower bound")
    if "ilp" in shown:
        _draw_series(axes, "ilp", shown["ilp"], PLANNED, "*", width=2.4, size=13)
    axes.set_title(f"{title}\n", loc="left", fontsize=11)
    axes.set_xlabel(f"predicted peak ({unit}); dashed: budgets, as shares of {format_bytes(in_core_bytes)}")
    _scale_losses(axes, [lost for found in shown.values() for _, lost in found])
    _add_legend(axes, [policy for policy in points if policy not in shown])
    return figure


def _lost(plan: Plan, step_ms: float) -> float:
    """Time lost, in percent of the in-core step."""
    return (step_ms / plan.in_core_step_ms - 1) * 100


def _draw_budgets(axes: Axes, budgets_bytes: Iterable[int], in_core_bytes: int, scale: int) -> None:
    place = axes.get_xaxis_transform()
    for budget_bytes in budgets_bytes:
        axes.axvline(budget_bytes / scale, color=IN_CORE, linestyle="--", linewidth=0.8, zorder=0)
        told = f" {budget_bytes / in_core_bytes:.0%}" if in_core_bytes else ""
        axes.text(budget_bytes / scale, 1.0, told, ha="center", va="bottom", fontsize=8, transform=place)


def _draw_series(
    axes: Axes, policy: str, points: list[Point], colour: str, marker: str, *, width: float = 0.9, size: float = 5.5
) -> None:
    peaks, lost = zip(*points, strict=True)
    axes.plot(peaks, lost, color=colour, marker=marker, linewidth=width, markersize=size, alpha=0.9, label=policy)


def _scale_losses(axes: Axes, lost: list[float]) -> None:
    axes.set_ylabel("predicted time lost (% of the in-core step)")
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


def _add_legend(axes: Axes, missing: list[str]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    told = sorted(zip(labels, handles, strict=True), key=lambda pair: (pair[0] != "ilp", pair[0] != "lower bound"))
    title = "fits nowhere: " + ", ".join(missing) if missing else None
    legend = axes.legend(
        [handle for _, handle in told], [label for label, _ in told], loc="upper left", bbox_to_anchor=(1.01, 1.0),
        fontsize=8.5, frameon=False, title=title, title_fontsize=8,
    )  # fmt: skip
    legend.set_alignment("left")
