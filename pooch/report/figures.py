"""Pictures (matplotlib, drawn without a display). They draw what `curves` collected."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pooch.errors import UsageError
from pooch.ir import Plan, Profile
from pooch.ir.files import replace_file
from pooch.report.curves import MemoryCurve, ProfilePicture, StepPicture, plan_picture, profile_picture
from pooch.units import format_bytes, format_ms

# Colours that people with any colour vision tell apart (Okabe and Ito).
_IN_CORE, _PLANNED, _BUDGET = "#999999", "#0072B2", "#D55E00"
_KIND_COLOURS = {"op": "#BBCCDD", "replay": "#E69F00", "stall": "#D55E00", "copy": "#009E73"}
_STREAM_ROWS = {"compute": 2, "copy_out": 1, "copy_in": 0}
_MIB = 2**20
_GIB = 2**30
FORMATS = (".png", ".pdf", ".svg")


def draw_plan(profile: Profile, plan: Plan) -> Figure:
    """Top: live bytes over time, in-core and planned, with the budget. Bottom: what the three streams do."""
    return draw_step_picture(plan_picture(profile, plan))


def draw_profile(profile: Profile, *, depth: int | None = 2) -> Figure:
    """Top: live bytes over time. Bottom: bytes of activations by layer."""
    return draw_profile_picture(profile_picture(profile, depth=depth))


def draw_step_picture(picture: StepPicture) -> Figure:
    """Draw a planned step."""
    figure = _figure(height=6.2)
    memory, streams = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    divisor, unit = _time_unit(max(picture.step_ms, float(picture.in_core.time_ms[-1])))
    scale = _byte_unit(picture.in_core)
    _draw_curve(memory, picture.in_core, _IN_CORE, divisor, scale)
    _draw_curve(memory, picture.planned, _PLANNED, divisor, scale)
    if picture.budget_bytes:
        label = f"budget {format_bytes(picture.budget_bytes)}"
        memory.axhline(picture.budget_bytes / scale, color=_BUDGET, linestyle="--", linewidth=1.4, label=label)
    _finish_memory(memory, scale, picture.title)
    _draw_streams(streams, picture, divisor)
    for axes in (memory, streams):
        axes.axvline(picture.backward_ms / divisor, color="black", linestyle=":", linewidth=1)
    _mark_passes(memory, picture.backward_ms / divisor)
    streams.set_xlabel(f"time since the step began ({unit})")
    return figure


def draw_profile_picture(picture: ProfilePicture) -> Figure:
    """Draw a profile."""
    figure = _figure(height=4.2 + 0.2 * len(picture.layers))
    memory, layers = figure.subplots(2, 1, height_ratios=(3.2, 0.4 + 0.2 * len(picture.layers)))
    divisor, unit = _time_unit(float(picture.in_core.time_ms[-1]))
    scale = _byte_unit(picture.in_core)
    _draw_curve(memory, picture.in_core, _PLANNED, divisor, scale)
    label = f"persistent {format_bytes(picture.persistent_bytes)}"
    memory.axhline(picture.persistent_bytes / scale, color=_IN_CORE, linestyle="--", linewidth=1.2, label=label)
    memory.axvline(picture.backward_ms / divisor, color="black", linestyle=":", linewidth=1)
    _finish_memory(memory, scale, picture.title)
    _mark_passes(memory, picture.backward_ms / divisor)
    memory.set_xlabel(f"time since the step began ({unit})")
    _draw_layers(layers, picture)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that the file's ending names.

    Raises:
        UsageError: the ending is none that can be drawn.
        FileFormatError: the file cannot be written.
    """
    check_figure_path(path)
    buffer = BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower().removeprefix("."), dpi=150)
    replace_file(path, buffer.getvalue())


def check_figure_path(path: str | Path) -> None:
    """Refuse an ending that cannot be drawn, before any work is done.

    Raises:
        UsageError: it is none of png, pdf, svg.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"cannot draw {str(path)!r}: give a file that ends in {', '.join(FORMATS)}")


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
        axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=_KIND_COLOURS[bars.kind], linewidth=0, label=label)
    axes.set_yticks(list(_STREAM_ROWS.values()), ["compute", "copy-out", "copy-in"])
    axes.set_ylim(-0.6, 2.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_layers(axes: Axes, picture: ProfilePicture) -> None:
    names = [name for name, _ in picture.layers]
    sizes = [size / _MIB for _, size in picture.layers]
    axes.barh(range(len(names)), sizes, color=_KIND_COLOURS["copy"])
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
