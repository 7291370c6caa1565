"""The comparison as a picture: time against memory, one line per policy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..api.measure.comparison import ComparisonRow
from ..ground.colours import BUDGET, CHOICES, IN_CORE, LIGHT, PLANNED
from ..ground.units import format_bytes
from ..ir import Plan
from ..planner.policies import OWN
from .curves import byte_unit

_BEST, _PLAIN = "ilp", "keep_all"
_COLOURS = {
    "ilp": PLANNED,
    "ilp_swap": CHOICES["swap"],
    "ilp_recompute": CHOICES["recompute"],
    "online": CHOICES["split"],
}
# A family is what the policies of a method decide between.
_FAMILIES = {"swap only": "s", "recompute only": "^", "swap and recompute": "o", "keep everything": "D"}
_LABEL_HEIGHT_INCHES = 0.17
_LEAST_BETWEEN_NAMES = 0.04  # of budgets, as a share of all that the picture shows

Point = tuple[float, float]  # peak in the unit of the picture, and time lost in percent


@dataclass(slots=True)
class _Series:
    """One policy: its points by ascending peak, and what its plans decide between."""

    policy: str
    points: list[Point] = field(default_factory=list)
    choices: set[str] = field(default_factory=set)

    @property
    def is_ours(self) -> bool:
        name = self.policy.partition("(")[0]
        return name in OWN and name != _PLAIN

    @property
    def family(self) -> str:
        moved = [choice for choice in ("swap", "recompute") if choice in self.choices]
        return " and ".join(moved) + (" only" if len(moved) == 1 else "") if moved else "keep everything"


def draw_pareto(rows: Iterable[ComparisonRow], title: str, *, show_all: bool = False) -> Figure:
    """Peak memory to the right, time lost upwards: better plans are closer to the lower left corner.

    Args:
        rows: of the comparison.
        title: what was planned.
        show_all: also the policies that others beat in time and memory under every budget.
    """
    rows = list(rows)
    plans = [row.plan for row in rows if row.plan is not None]
    in_core_bytes = plans[-1].in_core_peak_bytes if plans else 0
    budgets_bytes = sorted({row.budget_bytes for row in rows})
    scale, unit = byte_unit(in_core_bytes or max(budgets_bytes, default=0))
    series, missing = _series(rows, scale)
    front = _front(series)
    shown = [each for each in series if show_all or each.policy == _BEST or front & set(each.points)]
    figure = Figure(figsize=(10, max(5.6, 2.2 + _LABEL_HEIGHT_INCHES * len(shown))), layout="constrained")
    axes = figure.subplots()
    _draw_budgets(axes, budgets_bytes, in_core_bytes, scale)
    for each in sorted(shown, key=lambda each: (each.is_ours, each.policy == _BEST)):
        _draw_series(axes, each)
    _draw_bound(axes, rows, scale)
    axes.set_title(f"{title}\n{_finding(rows)}\n", loc="left", fontsize=11)
    shares = f", as shares of {format_bytes(in_core_bytes)}" if in_core_bytes else ""
    axes.set_xlabel(f"predicted peak ({unit}); dashed: budgets{shares}")
    _scale_losses(axes, [lost for each in shown for _, lost in each.points])
    _name_series(axes, shown, figure.get_size_inches()[1])
    _add_legend(axes, shown)
    hidden = [each.policy for each in series if each not in shown]
    beaten = "beaten in time and memory under every budget (--all draws them)"
    _add_remarks(figure, {beaten: hidden, "fits nowhere": missing})
    return figure


def _series(rows: Sequence[ComparisonRow], scale: int) -> tuple[list[_Series], list[str]]:
    """The policies that have plans, and the names of those that have none."""
    found = {row.policy: _Series(row.policy) for row in rows}
    for row in rows:
        if row.plan is not None and row.plan.in_core_step_ms > 0:
            point = row.plan.predicted_peak_bytes / scale, _lost(row.plan, row.plan.predicted_step_ms)
            found[row.policy].points.append(point)
            found[row.policy].choices.update(row.plan.decisions.values())
    for each in found.values():
        each.points.sort()
    shown = [each for each in found.values() if each.points]
    return shown, [each.policy for each in found.values() if not each.points]


def _front(series: Iterable[_Series]) -> set[Point]:
    """The Pareto front: the points than which none has both less memory and less time lost."""
    front: set[Point] = set()
    least = math.inf
    for peak, lost in sorted({point for each in series for point in each.points}):
        if lost < least:
            front.add((peak, lost))
            least = lost
    return front


def _finding(rows: Sequence[ComparisonRow]) -> str:
    """How the best plan compares with the best of the others, under the smallest budget that both have a plan for."""
    if all(row.plan is None for row in rows):
        return f"no policy has a plan within {format_bytes(max(row.budget_bytes for row in rows))}"
    by_budget: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.plan is not None and row.plan.in_core_step_ms > 0:
            by_budget.setdefault(row.budget_bytes, {})[row.policy] = _lost(row.plan, row.plan.predicted_step_ms)
    for budget_bytes, losses in sorted(by_budget.items()):
        others = {policy: lost for policy, lost in losses.items() if policy.partition("(")[0] not in OWN}
        if _BEST in losses and others:
            best = min(others, key=lambda policy: others[policy])
            within = f"within {format_bytes(budget_bytes)} the integer program loses {losses[_BEST]:.1f}% of time"
            return f"{within}, the best of the others ({best}) {others[best]:.1f}%"
    return ""


def _lost(plan: Plan, step_ms: float) -> float:
    """Time lost, in percent of the in-core step."""
    return (step_ms / plan.in_core_step_ms - 1) * 100


def _draw_budgets(axes: Axes, budgets_bytes: Sequence[int], in_core_bytes: int, scale: int) -> None:
    place = axes.get_xaxis_transform()
    named = -math.inf
    for budget_bytes in budgets_bytes:
        at = budget_bytes / scale
        axes.axvline(at, color=BUDGET, linestyle="--", linewidth=0.8, alpha=0.6, zorder=0)
        if in_core_bytes and at - named >= _LEAST_BETWEEN_NAMES * (budgets_bytes[-1] - budgets_bytes[0]) / scale:
            share = f" {budget_bytes / in_core_bytes:.0%}"
            axes.text(at, 1.0, share, ha="center", va="bottom", fontsize=8, transform=place)
            named = at


def _draw_series(axes: Axes, series: _Series) -> None:
    peaks, lost = zip(*series.points, strict=True)
    is_best = series.policy == _BEST
    axes.plot(
        peaks, lost, color=_colour(series), marker="*" if is_best else _FAMILIES[series.family], label=series.policy,
        linewidth=2.4 if is_best else 1.6 if series.is_ours else 0.8, markersize=13 if is_best else 6,
        alpha=1.0 if series.is_ours else 0.75,
    )  # fmt: skip


def _colour(series: _Series) -> str:
    return _COLOURS.get(series.policy.partition("(")[0], IN_CORE)


def _draw_bound(axes: Axes, rows: Iterable[ComparisonRow], scale: int) -> None:
    plans = {row.budget_bytes: row.plan for row in rows if row.policy == _BEST and row.plan is not None}
    if plans:
        at = [budget_bytes / scale for budget_bytes in sorted(plans)]
        lost = [_lost(plans[each], plans[each].lower_bound_ms) for each in sorted(plans)]
        axes.plot(at, lost, color=PLANNED, linestyle=":", marker="_", linewidth=1.2, label="lower bound")


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


def _name_series(axes: Axes, series: Iterable[_Series], height_inches: float) -> None:
    """Write each name to the right of the picture, at the height of its last point, with a line to it."""
    ends = {}
    for each in series:
        peak, lost = each.points[-1]
        ends[each.policy] = (axes.transAxes.inverted().transform(axes.transData.transform((peak, lost)))[1], each)
    ordered = sorted(ends.values(), key=lambda end: (end[0], end[1].policy))
    heights = spread([height for height, _ in ordered], _LABEL_HEIGHT_INCHES / (0.7 * height_inches))
    for height, (_, each) in zip(heights, ordered, strict=True):
        style = {"color": _colour(each), "fontweight": "bold"} if each.is_ours else {"color": LIGHT["quiet"]}
        leader = {"arrowstyle": "-", "color": LIGHT["line"], "linewidth": 0.7, "shrinkB": 4, "relpos": (0, 0.5)}
        axes.annotate(
            each.policy, each.points[-1], (1.03, height), textcoords="axes fraction", va="center", fontsize=8.5,
            arrowprops=leader, annotation_clip=False, **style,
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved apart by at least `gap`, around where they were, and from 0 upwards."""
    placed: list[list[float]] = []  # clusters of wanted heights that touch one another
    for height in heights:
        placed.append([height])
        while len(placed) > 1 and _low(placed[-1], gap) < _low(placed[-2], gap) + gap * len(placed[-2]):
            placed[-2:] = [placed[-2] + placed[-1]]
    return [_low(cluster, gap) + gap * place for cluster in placed for place in range(len(cluster))]


def _low(cluster: Sequence[float], gap: float) -> float:
    """Where the lowest of a cluster comes to lie."""
    return max(0.0, sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2)


def _add_legend(axes: Axes, series: Iterable[_Series]) -> None:
    """What the marks of the grey lines mean, and the lower bound."""
    handles, labels = axes.get_legend_handles_labels()
    bound = [handle for handle, label in zip(handles, labels, strict=True) if label == "lower bound"]
    families = [family for family in _FAMILIES if any(each.family == family for each in series if each.policy != _BEST)]
    marks = [axes.plot([], [], _FAMILIES[family], color=IN_CORE, label="_")[0] for family in families]
    if marks or bound:
        names = [*families, *("lower bound of the integer program" for _ in bound)]
        axes.legend(
            [*marks, *bound], names, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(names), fontsize=8,
            frameon=False, columnspacing=1.4, handletextpad=0.3,
        )  # fmt: skip


def _add_remarks(figure: Figure, remarks: dict[str, list[str]]) -> None:
    lines = [f"{remark}: {', '.join(policies)}" for remark, policies in remarks.items() if policies]
    if lines:
        wrapped = "\n".join(textwrap.fill(line, 130) for line in lines)
        figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=8, color=LIGHT["quiet"])
