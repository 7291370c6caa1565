"""Figures (matplotlib, without a display) of what `curves` collects."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import UsageError
from ..ir import Plan, Profile
from ..ir.files import replace_file
from ..units import format_bytes, format_ms
from .colours import BUDGET, IN_CORE, KINDS, PLANNED
from .curves import MemoryCurve, ProfilePicture, StepPicture, plan_picture, profile_picture

_STREAM_ROWS = {"compute": 2, "copy_out": 1, "copy_in": 0}
_MIB = 2**20
_GIB = 2**30
FORMATS = (".png", ".pdf", ".svg")


def draw_plan(profile: Profile, plan: Plan) -> Figure:
    """Top: live bytes over time, in-core and planned, with the budget. Bottom: what the three streams do."""
    picture = plan_picture(profile, plan)
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    memory, streams = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    divisor, unit = _time_unit(max(picture.step_ms, float(picture.in_core.time_ms[-1])))
    scale = _byte_unit(picture.in_core)
    _draw_curve(memory, picture.in_core, IN_CORE, divisor, scale)
    _draw_curve(memory, picture.planned, PLANNED, divisor, scale)
    if picture.budget_bytes:
        label = f"budget {format_bytes(picture.budget_bytes)}"
        memory.axhline(picture.budget_bytes / scale, color=BUDGET, linestyle="--", linewidth=1.4, label=label)
    _finish_memory(memory, scale, picture.title)
    _draw_streams(streams, picture, divisor)
    for axes in (memory, streams):
        axes.axvline(picture.backward_ms / divisor, color="black", linestyle=":", linewidth=1)
    _mark_passes(memory, picture.backward_ms / divisor)
    streams.set_xlabel(f"time since the step began ({unit})")
    return figure


def draw_profile(profile: Profile, *, depth: int | None = 2) -> Figure:
    """Top: live bytes over time. Bottom: bytes of activations by layer."""
    picture = profile_picture(profile, depth=depth)
    figure = Figure(figsize=(10, 4.2 + 0.2 * len(picture.layers)), layout="constrained")
    memory, layers = figure.subplots(2, 1, height_ratios=(3.2, 0.4 + 0.2 * len(picture.layers)))
    divisor, unit = _time_unit(float(picture.in_core.time_ms[-1]))
    scale = _byte_unit(picture.in_core)
    _draw_curve(memory, picture.in_core, PLANNED, divisor, scale)
    label = f"persistent {format_bytes(picture.persistent_bytes)}"
    memory.axhline(picture.persistent_bytes / scale, color=IN_CORE, linestyle="--", linewidth=1.2, label=label)
    memory.axvline(picture.backward_ms / divisor, color="black", linestyle=":", linewidth=1)
    _finish_memory(memory, scale, picture.title)
    _mark_passes(memory, picture.backward_ms / divisor)
    memory.set_xlabel(f"time since the step began ({unit})")
    _draw_layers(layers, picture)
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


def _draw_curve(axes: Axes, curve: MemoryCurve, colour: str, divisor: float, scale: int) -> None:
    peak = format_bytes(int(curve.live_bytes.max()))
    label = f"{curve.name}: peak {peak}, {format_ms(float(curve.time_ms[-1]))}"
    times, live = curve.time_ms / divisor, curve.live_bytes / scale
    axes.fill_between(times, live, step="post", color=colour, alpha=0.15, linewidth=0)
    axes.step(times, live, where="post", color=colour, linewidth=1.2, label=label)


def _finish_memory(axes: Axes, scale: int, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(f"live device memory ({'GiB' if scale == _GIB else 'MiB'})")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)  # room for the names of the passes
    axes.margins(x=0.01)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", fontsize=9, framealpha=0.9)


def _mark_passes(axes: Axes, boundary: float) -> None:
    place = axes.get_xaxis_transform()
    axes.text(boundary, 0.99, "forward  ", ha="right", va="top", fontsize=9, transform=place)
    axes.text(boundary, 0.99, "  backward", ha="left", va="top", fontsize=9, transform=place)


def _draw_streams(axes: Axes, picture: StepPicture, divisor: float) -> None:
    named: set[str] = set()
    for bars in picture.bars:
        spans = [(start / divisor, duration / divisor) for start, duration in bars.spans_ms]
        label = bars.kind if bars.kind not in named else None
        named.add(bars.kind)
        row = _STREAM_ROWS[bars.stream]
        axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=KINDS[bars.kind], linewidth=0, label=label)
    axes.set_yticks(list(_STREAM_ROWS.values()), ["compute", "copy-out", "copy-in"])
    axes.set_ylim(-0.6, 2.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_layers(axes: Axes, picture: ProfilePicture) -> None:
    names = [name for name, _ in picture.layers]
    sizes = [size / _MIB for _, size in picture.layers]
    axes.barh(range(len(names)), sizes, color=KINDS["copy"])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("activations (MiB)")
    axes.set_title(picture.layers_title, loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _time_unit(longest_ms: float) -> tuple[float, str]:
    return (1000.0, "s") if longest_ms >= 2000 else (1.0, "ms")


def _byte_unit(curve: MemoryCurve) -> int:
    return _GIB if curve.live_bytes.max() >= 2 * _GIB else _MIB
