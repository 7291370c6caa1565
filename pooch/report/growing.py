"""The largest size that fits: as a table, as a record, and as a picture of throughput against size."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..api.batch_search.results import MaxBatch
from ..api.measure.doubt import BUSY, SPREAD, doubt_of_sizes, spread_of
from ..ground.colours import BOUND, BUDGET, IN_CORE, PLANNED
from ..ground.units import format_bytes, format_ms
from .curves import byte_unit, device_title
from .fitting import Column, FittedTable
from .summaries import Record
from .tables import facts_table, frame_table

_TIMES = {
    "device": ("modelled", "modelled: no op was run; the times are those of a model of the device"),
    "ops": (
        "ops measured",
        "modelled from ops, each measured by itself on this machine; no step was run (mode fake)",
    ),
    "steps": ("steps measured", "without a plan, measured steps on this machine; under plans, simulated from these"),
}


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
        "times": _TIMES[_kind_of_times(result)][0],
        "verdict": max_batch_verdict(result),
        "doubt": doubt_of_max_batch(result),
        "profiles": result.profiles,
        "plans": result.plans,
        "curve": frame.to_dict(orient="records"),
        "measured": [
            asdict(each) | {"within_budget": each.is_within(result.budget_bytes), "items_per_s": each.items_per_s}
            for each in result.measured
        ],
    }


def _kind_of_times(result: MaxBatch) -> str:
    return "device" if result.device.modelled else "ops" if result.mode == "fake" else "steps"


def max_batch_verdict(result: MaxBatch) -> str:
    """The largest size, and what it costs, in one line."""
    setting, largest = result.sizes.setting, result.largest
    fits = f"{setting} {largest.size} fits into {format_bytes(result.budget_bytes)}"
    if result.in_core is None:
        return f"{fits} under a plan; without Pooch, not even {result.sizes.smallest} does"
    if result.in_core.size == largest.size:
        return f"{fits} without Pooch, and no larger one {'under a plan' if result.refused[0] else 'was tried'}"
    more = f"{result.multiple:.1f} times the {result.in_core.size} without Pooch"
    return f"{fits} under a plan, {more}, at {result.relative_throughput:.0%} of its throughput (predicted)"


def doubt_of_max_batch(result: MaxBatch) -> str | None:
    """Why the times are not to be trusted, in one line, or None."""
    spread = max((spread_of(each.samples_ms) for each in result.measured), default=1.0)
    if spread >= SPREAD:
        return f"measured times vary by {spread:.1f}x: {BUSY}; repeat with --steps 5"
    found = doubt_of_sizes([each.size for each in result.curve], [each.in_core_step_ms for each in result.curve])
    if found is None or result.device.modelled:
        return None
    how = "--mode run --repeats 5" if result.mode == "fake" else "--repeats 5"
    return f"{found}; repeat when it is idle, or with {how}"


def max_batch_tables(result: MaxBatch) -> list[Table | FittedTable]:
    """What fits, the curve, and what was measured."""
    curve = result.to_frame().round({"items_per_s": 2, "slowdown": 3})
    facts = facts_table(_title(result), _facts(result))
    tables: list[Table | FittedTable] = [facts, frame_table("planned sizes", curve)]
    return [*tables, _measured_table(result)] if result.measured else tables


def _title(result: MaxBatch) -> str:
    return f"{result.workload} within {format_bytes(result.budget_bytes)} on {device_title(result.device)}"


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
    facts["times"] = _TIMES[_kind_of_times(result)][1]
    facts["looked at"] = f"{result.profiles} sizes profiled (mode {result.mode}), {result.plans} of them planned"
    return facts


def _measured_table(result: MaxBatch) -> FittedTable:
    drops = {"": 0, "peak": 0, "predicted peak": 1, "reserved": 3, "within budget": 0, "step": 0, "predicted step": 2}
    columns = [Column(name, "figure" if name else "word", drop) for name, drop in (drops | {"items/s": 0}).items()]
    table = FittedTable("measured", columns)
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
    figure = Figure(figsize=(10, 6), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_speed(speed, result)
    _draw_memory(memory, result)
    for axes in (speed, memory):
        if result.in_core is not None:
            axes.axvline(result.in_core.size, color=IN_CORE, linestyle=":", linewidth=1.2, zorder=0)
        axes.axvline(result.largest.size, color=PLANNED, linestyle=":", linewidth=1.2, zorder=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    memory.set_xlabel(f"{result.sizes.setting} (dotted: largest in-core, largest under a plan)")
    return figure


def _finding(result: MaxBatch) -> str:
    """What the picture shows, in two lines."""
    device = device_title(result.device)
    largest = f"{result.sizes.setting.replace('_', ' ')} {result.largest.size}"
    fits = f"{result.workload}: {largest} fits into {format_bytes(result.budget_bytes)} under a plan"
    if result.in_core is None:
        compared = f"; none fits in-core\non {device}"
    else:
        share = f"{result.relative_throughput:.0%} of the throughput"
        compared = f",\n{result.multiple:.2f} times the {result.in_core.size} that fits in-core, with {share}, on "
        compared += device
    return fits + compared


def _draw_speed(axes: Axes, result: MaxBatch) -> None:
    sizes = [point.size for point in result.curve]
    planned = [point.items_per_s for point in result.curve]
    axes.plot(sizes, planned, "o-", color=PLANNED, label=f"planned ({result.policy})")
    bounds = [1000 * point.items / point.lower_bound_ms for point in result.curve]
    axes.plot(sizes, bounds, ":", color=BOUND, label="no plan is faster")
    for each in result.measured:
        label = f"measured, {'planned' if each.planned else 'in-core'}"
        colour = PLANNED if each.planned else IN_CORE
        axes.plot([each.size], [each.items_per_s], "*", markersize=13, color=colour, label=label)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.set_ylabel("items per second")
    axes.set_title(_finding(result), loc="left", fontsize=11)


def _draw_memory(axes: Axes, result: MaxBatch) -> None:
    sizes = [point.size for point in result.curve]
    in_core = [point.in_core_peak_bytes for point in result.curve]
    scale, unit = byte_unit(max([result.budget_bytes, *in_core]))
    planned = [point.peak_bytes / scale for point in result.curve]
    axes.plot(sizes, [each / scale for each in in_core], "s-", color=IN_CORE, label="in-core")
    axes.plot(sizes, planned, "o-", color=PLANNED, label="under the plan")
    label = f"budget {format_bytes(result.budget_bytes)}"
    axes.axhline(result.budget_bytes / scale, color=BUDGET, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylabel(f"peak ({unit})")
    axes.set_ylim(bottom=0)
