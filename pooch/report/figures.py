"""Figures (matplotlib, without a display) of profiles and plans."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..api.options import in_flight
from ..api.simulation import simulate, simulate_in_core, simulate_moves_of
from ..ground.colours import BOUND, BUDGET, IN_CORE, KIND_HATCHES, KINDS, PERSISTENT, PLANNED
from ..ground.errors import UsageError
from ..ground.units import format_bytes, format_ms
from ..ir import Plan, Profile, Timeline
from ..ir.files import replace_file
from ..simulator import MovingStep
from .curves import byte_unit, mark_passes, memory_curve, profile_title, stream_bars, time_unit
from .layers import layer_frame
from .summaries import PERSISTENT_NAMES

_STREAM_ROWS = {"compute": 2, "copy_out": 1, "copy_in": 0}
_MIB = 2**20
FORMATS = (".png", ".pdf", ".svg")


def draw_plan(profile: Profile, plan: Plan) -> Figure:
    """Top: live bytes over time, in-core and planned, with the budget. Bottom: what the three streams do."""
    profile = in_flight(profile.variant(plan.splits), plan.microbatches_in_flight)
    in_core, step = simulate_in_core(profile), simulate_moves_of(profile, plan)
    planned = simulate(profile, plan) if step is None else step.timeline
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    memory, streams = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    divisor, unit = time_unit(max(planned.step_ms, in_core.step_ms))
    scale, byte_name = byte_unit(in_core.peak_bytes)
    _draw_curve(memory, "in-core", in_core, IN_CORE, divisor, scale)
    _draw_curve(memory, f"planned ({plan.policy})", planned, PLANNED, divisor, scale)
    if step is not None:
        _draw_persistent(memory, step, divisor, scale)
    if plan.budget_bytes:
        label = f"budget {format_bytes(plan.budget_bytes)}"
        memory.axhline(plan.budget_bytes / scale, color=BUDGET, linestyle="--", linewidth=1.4, label=label)
    # Where there are bands along the bottom, the legend would hide them.
    _finish_memory(memory, byte_name, profile_title(profile), has_bands=step is not None)
    _draw_streams(streams, planned, divisor)
    backward = float(planned.slot_start_ms[profile.forward_ops]) / divisor
    for axes in (memory, streams):
        axes.axvline(backward, color="black", linestyle=":", linewidth=1)
    mark_passes(memory, backward)
    streams.set_xlabel(f"time since the step began ({unit})")
    return figure


def draw_profile(profile: Profile, *, depth: int | None = 2, longest: int = 24) -> Figure:
    """Top: live bytes over time. Bottom: bytes of activations by layer, of the `longest` largest layers."""
    in_core = simulate_in_core(profile)
    frame = layer_frame(profile, depth=depth)
    sizes = frame.loc[frame["size_bytes"] > 0, "size_bytes"]
    shown = sizes[sizes.index.isin(sizes.nlargest(longest).index)]
    figure = Figure(figsize=(10, 4.2 + 0.2 * len(shown)), layout="constrained")
    memory, layers = figure.subplots(2, 1, height_ratios=(3.2, 0.4 + 0.2 * len(shown)))
    divisor, unit = time_unit(in_core.step_ms)
    scale, byte_name = byte_unit(in_core.peak_bytes)
    _draw_curve(memory, "in-core", in_core, IN_CORE, divisor, scale)
    label = f"persistent {format_bytes(profile.persistent_bytes)}"
    memory.axhline(profile.persistent_bytes / scale, color=BOUND, linestyle="--", linewidth=1.2, label=label)
    backward = float(in_core.slot_start_ms[profile.forward_ops]) / divisor
    memory.axvline(backward, color="black", linestyle=":", linewidth=1)
    _finish_memory(memory, byte_name, profile_title(profile))
    mark_passes(memory, backward)
    memory.set_xlabel(f"time since the step began ({unit})")
    which = f"the {len(shown)} largest of {len(sizes)} layers" if len(shown) < len(sizes) else "layers"
    _draw_layers(layers, {str(layer): int(size) for layer, size in shown.items()}, which)
    return figure


def draw_timeline(timeline: Timeline) -> Figure:
    """Top: live bytes over time. Bottom: what the three streams do, if that was simulated."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    memory, streams = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    divisor, unit = time_unit(timeline.step_ms)
    scale, byte_name = byte_unit(timeline.peak_bytes)
    _draw_curve(memory, "simulated", timeline, PLANNED, divisor, scale)
    _finish_memory(memory, byte_name, "simulated step")
    _draw_streams(streams, timeline, divisor)
    streams.set_xlabel(f"time since the step began ({unit})")
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the file's suffix.

    Raises:
        UsageError: the suffix is not png, pdf or svg.
        FileFormatError: the file cannot be written.
    """
    check_figure_path(path)
    buffer = BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower().removeprefix("."), dpi=150)
    replace_file(path, buffer.getvalue())


def check_figure_path(path: str | Path) -> None:
    """Refuse a file name of another format before any work is done.

    Raises:
        UsageError: the suffix is not png, pdf or svg.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"cannot draw {str(path)!r}: give a file that ends in {', '.join(FORMATS)}")


def _draw_curve(axes: Axes, name: str, timeline: Timeline, colour: str, divisor: float, scale: int) -> None:
    label = f"{name}: peak {format_bytes(timeline.peak_bytes)}, {format_ms(timeline.step_ms)}"
    time_ms, live_bytes = memory_curve(timeline)
    axes.fill_between(time_ms / divisor, live_bytes / scale, step="post", color=colour, alpha=0.15, linewidth=0)
    axes.step(time_ms / divisor, live_bytes / scale, where="post", color=colour, linewidth=1.2, label=label)


def _draw_persistent(axes: Axes, step: MovingStep, divisor: float, scale: int) -> None:
    """Who of what outlives the step is there, one above the other beneath the curve of the plan."""
    time_ms, _ = memory_curve(step.timeline)
    below: numpy.ndarray = numpy.zeros(len(time_ms))
    for kind, points in step.residence.kind_points().items():
        above = below + numpy.append(points, points[-1:]) / scale
        axes.fill_between(
            time_ms / divisor, below, above, step="post", color=PERSISTENT[kind], alpha=0.55, linewidth=0,
            label=PERSISTENT_NAMES[kind],
        )  # fmt: skip
        below = above


def _finish_memory(axes: Axes, unit: str, title: str, *, has_bands: bool = False) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(f"live device memory ({unit})")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)  # room for the names of the passes
    axes.margins(x=0.01)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right" if has_bands else "lower center", fontsize=9, framealpha=0.9)


def _draw_streams(axes: Axes, timeline: Timeline, divisor: float) -> None:
    named: set[str] = set()
    for (stream, kind), spans_ms in stream_bars(timeline).items():
        spans = [(start_ms / divisor, duration_ms / divisor) for start_ms, duration_ms in spans_ms]
        label = kind if kind not in named else None
        named.add(kind)
        row = _STREAM_ROWS[stream]
        axes.broken_barh(
            spans, (row - 0.38, 0.76), facecolors=KINDS[kind], linewidth=0, label=label,
            hatch=KIND_HATCHES[kind], edgecolor="white",
        )  # fmt: skip
    axes.set_yticks(list(_STREAM_ROWS.values()), ["compute", "copy-out", "copy-in"])
    axes.set_ylim(-0.6, 2.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_layers(axes: Axes, sizes: Mapping[str, int], which: str) -> None:
    axes.barh(range(len(sizes)), [size_bytes / _MIB for size_bytes in sizes.values()], color=IN_CORE)
    axes.set_yticks(range(len(sizes)), list(sizes), fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("activations (MiB)")
    axes.set_title(f"activations by layer: {which}, in forward order", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
