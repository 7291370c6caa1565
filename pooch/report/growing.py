"""The largest size that fits: as a table, as a record, and as a picture of throughput against size."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..batch_search.results import MaxBatch
from ..units import format_bytes, format_ms
from .colours import BOUND, BUDGET, IN_CORE, PLANNED
from .summaries import Record
from .tables import facts_table, frame_table


def max_batch_record(result: MaxBatch) -> Record:
    """For `--json`."""
    frame = result.to_frame().reset_index()
    return {
        "workload": result.workload,
        "policy": result.policy,
        "budget_bytes": result.budget_bytes,
        "device": result.device.name,
        "modelled": result.device.modelled,
        "mode": result.mode,
        "setting": result.sizes.setting,
        "largest": result.largest.size,
        "in_core_largest": result.in_core.size if result.in_core else None,
        "multiple": result.multiple,
        "relative_throughput": result.relative_throughput,
        "best": result.best.size,
        "refused": result.refused[0] or None,
        "refused_minimum_bytes": result.refused[1] or None,
        "profiles": result.profiles,
        "plans": result.plans,
        "curve": frame.to_dict(orient="records"),
        "measured": [
            asdict(each) | {"within_budget": each.is_within(result.budget_bytes), "items_per_s": each.items_per_s}
            for each in result.measured
        ],
    }


def max_batch_tables(result: MaxBatch) -> list[Table]:
    """What fits, the curve, and what was measured."""
    curve = result.to_frame().round({"items_per_s": 2, "slowdown": 3})
    tables = [facts_table(_title(result), _facts(result)), frame_table("planned sizes", curve)]
    return [*tables, _measured_table(result)] if result.measured else tables


def _title(result: MaxBatch) -> str:
    modelled = " (modelled)" if result.device.modelled else ""
    return f"{result.workload} within {format_bytes(result.budget_bytes)} on {result.device.name}{modelled}"


def _facts(result: MaxBatch) -> dict[str, str]:
    setting, largest, best = result.sizes.setting, result.largest, result.best
    facts = {f"largest {setting}": f"{largest.size}, planned by {result.policy}"}
    if result.in_core is None:
        facts["in-core"] = f"not even the smallest, {result.sizes.smallest}, fits without a plan"
    else:
        in_core = result.in_core
        facts["in-core"] = f"{in_core.size}, {in_core.items_per_s:.1f} items/s"
        facts["larger by"] = f"{result.multiple:.2f} times"
        facts["throughput"] = f"{largest.items_per_s:.1f} items/s, {result.relative_throughput:.1%} of in-core"
    facts["best throughput"] = f"{best.items_per_s:.1f} items/s at {best.size}"
    if result.refused[0]:
        facts["beyond"] = f"{result.refused[0]} would need {format_bytes(result.refused[1])}"
    facts["looked at"] = f"{result.profiles} sizes profiled (mode {result.mode}), {result.plans} of them planned"
    return facts


def _measured_table(result: MaxBatch) -> Table:
    table = facts_table("measured", {})
    table.show_header = True
    for heading in ("", "peak", "predicted", "reserved", "within budget", "step", "predicted", "items/s"):
        table.add_column(heading, justify="right")
    for each in result.measured:
        table.add_row(
            f"{each.size} {'planned' if each.planned else 'in-core'}",
            format_bytes(each.peak_bytes),
            format_bytes(each.predicted_peak_bytes),
            "-" if each.reserved_bytes is None else format_bytes(each.reserved_bytes),
            "yes" if each.is_within(result.budget_bytes) else "NO",
            format_ms(each.step_ms),
            format_ms(each.predicted_step_ms),
            f"{each.items_per_s:.2f}",
        )
    if result.in_core is not None and all(each.planned for each in result.measured):
        peak = format_bytes(result.in_core.in_core_peak_bytes)
        table.add_row(f"{result.in_core.size} in-core", "does not fit here", peak, "", "", "", "", "")
    return table


def draw_max_batch(result: MaxBatch) -> Figure:
    """Top: throughput against size. Bottom: peak bytes, planned and in-core, with the budget."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_speed(speed, result)
    _draw_memory(memory, result)
    for axes in (speed, memory):
        if result.in_core is not None:
            axes.axvline(result.in_core.size, color=IN_CORE, linestyle=":", linewidth=1.2)
        axes.axvline(result.largest.size, color=BUDGET, linestyle=":", linewidth=1.2)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    memory.set_xlabel(f"{result.sizes.setting} (dotted: largest in-core, largest under a plan)")
    return figure


def _draw_speed(axes: Axes, result: MaxBatch) -> None:
    sizes = [point.size for point in result.curve]
    axes.plot(sizes, [point.items_per_s for point in result.curve], "o-", color=PLANNED, label=result.policy)
    bounds = [1000 * point.items / point.lower_bound_ms for point in result.curve]
    axes.plot(sizes, bounds, ":", color=BOUND, label="no plan is faster")
    for each in result.measured:
        label = f"measured, {'planned' if each.planned else 'in-core'}"
        colour = BUDGET if each.planned else IN_CORE
        axes.plot([each.size], [each.items_per_s], "*", markersize=13, color=colour, label=label)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.set_ylabel("items per second")
    axes.set_title(_title(result), loc="left", fontsize=11)
    axes.legend(loc="lower left", fontsize=9)


def _draw_memory(axes: Axes, result: MaxBatch) -> None:
    sizes = [point.size for point in result.curve]
    gib = 2**30
    axes.plot(sizes, [point.in_core_peak_bytes / gib for point in result.curve], "o-", color=IN_CORE, label="in-core")
    axes.plot(sizes, [point.peak_bytes / gib for point in result.curve], "o-", color=PLANNED, label="under the plan")
    axes.axhline(result.budget_bytes / gib, color=BUDGET, linestyle="--", linewidth=1.2, label="budget")
    axes.set_ylabel("peak (GiB)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=9)
