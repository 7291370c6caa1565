"""A picture of a layout: blocks over time and offset."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from ..api.simulation import simulate, simulate_in_core
from ..api.step_layouts import tick_times_ms
from ..ground.colours import BLOCK_EDGE, BLOCKS, BOUND, BUDGET, HATCHES, KINDS, PLANNED
from ..ground.units import format_bytes, format_ms
from ..ir import Plan, Profile
from ..ir.layout import StepLayout
from ..packing import Block, Layout
from .curves import mark_passes, profile_title, time_unit

_SHADES = (KINDS["op"], KINDS["copy"], KINDS["replay"], BOUND, BLOCKS["gradient"], BLOCKS["temporary"])
_MIB = 2**20


def draw_layout(blocks: Sequence[Block], layout: Layout) -> Figure:
    """Each block as a rectangle: its lifetime across, its bytes upwards. Lines: the arena's end and the bound."""
    shown = [(block, offset) for block, offset in zip(blocks, layout.offsets, strict=True) if block.size_bytes > 0]
    scale, unit = (_MIB, "MiB") if layout.arena_bytes >= _MIB else (1, "B")
    corners = []
    for block, offset in shown:
        low, high = offset / scale, (offset + block.size_bytes) / scale
        corners.append([(block.lower, low), (block.upper, low), (block.upper, high), (block.lower, high)])
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    colours = [_SHADES[index % len(_SHADES)] for index in range(len(shown))]
    line_width = 0.4 if len(shown) <= 2000 else 0.0
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="black", linewidths=line_width))
    bound = f"bound {format_bytes(layout.bound_bytes)}: the most bytes that live at once"
    arena = f"arena {format_bytes(layout.arena_bytes)}"
    axes.axhline(layout.bound_bytes / scale, color="black", linestyle=":", linewidth=1.4, label=bound)
    axes.axhline(layout.arena_bytes / scale, color=BUDGET, linestyle="--", linewidth=1.4, label=arena)
    if shown:
        axes.set_xlim(min(block.lower for block, _ in shown), max(block.upper for block, _ in shown))
        axes.set_ylim(0, layout.arena_bytes / scale * 1.12)
    axes.set_xlabel("time")
    axes.set_ylabel(f"offset ({unit})")
    axes.set_title(f"{len(blocks)} blocks, {layout.policy}: {layout.ratio:.4f} times the bound")
    axes.legend(loc="upper right", ncols=2)
    return figure


_NAMES = {
    "keep": "kept",
    "swap": "swapped",
    "recompute": "recomputed",
    "replay": "made on the way by replays",
    "gradient": "gradient",
    "temporary": "temporary",
    "fixed": "no decision",
    "before": "from before the step",
}


def draw_step_layout(profile: Profile, layout: StepLayout, plan: Plan | None = None) -> Figure:
    """The arena of a step: when each block lives and where it lies, coloured by what the plan does with it.

    Args:
        profile: the measured step.
        layout: of the plan's step, or of the step as it was profiled.
        plan: whose layout it is; None: the step as it was profiled.
    """
    times_ms = tick_times_ms(profile, plan)
    scale, unit = (_MIB, "MiB") if layout.arena_bytes >= _MIB else (1, "B")
    divisor, time_name = time_unit(times_ms[-1])
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots()
    for kind, name in _NAMES.items():
        corners = []
        for block in layout.blocks:
            if block.size_bytes and (block.kind == kind or (kind == "fixed" and block.kind == "program")):
                left, right = times_ms[block.lower] / divisor, times_ms[block.upper] / divisor
                low, high = block.offset / scale, (block.offset + block.size_bytes) / scale
                corners.append([(left, low), (right, low), (right, high), (left, high)])
        if corners:
            shown = PolyCollection(
                corners, facecolors=BLOCKS[kind], edgecolors=BLOCK_EDGE, linewidths=0.25, label=name,
                hatch=HATCHES.get(kind),
            )  # fmt: skip
            axes.add_collection(shown)
    bound = f"bound {format_bytes(layout.bound_bytes)}: the most bytes that live at once"
    axes.axhline(layout.bound_bytes / scale, color="black", linestyle=":", linewidth=1.4, label=bound)
    arena = f"arena {format_bytes(layout.arena_bytes)}"
    axes.axhline(layout.arena_bytes / scale, color=PLANNED, linestyle="-.", linewidth=1.4, label=arena)
    highest = layout.arena_bytes
    if plan is not None and plan.budget_bytes:
        room_bytes = plan.budget_bytes - layout.outside_bytes
        highest = max(highest, room_bytes)
        axes.axhline(
            room_bytes / scale, color=BUDGET, linestyle="--", linewidth=1.4,
            label=f"budget {format_bytes(plan.budget_bytes)} less {format_bytes(layout.outside_bytes)} outside",
        )  # fmt: skip
    timeline = simulate_in_core(profile) if plan is None else simulate(profile, plan)
    backward = float(timeline.slot_start_ms[profile.forward_ops]) / divisor
    axes.axvline(backward, color="black", linestyle=":", linewidth=1)
    mark_passes(axes, backward)
    axes.set_xlim(0, times_ms[-1] / divisor)
    axes.set_ylim(0, max(1, highest) / scale * 1.05)  # room for the names of the passes
    axes.set_xlabel(f"time since the step began ({time_name})")
    axes.set_ylabel(f"offset in the arena ({unit})")
    how = "in-core" if plan is None else f"planned by {plan.policy}, {format_ms(plan.predicted_step_ms)}"
    axes.set_title(
        f"{profile_title(profile)}, {how}: {len(layout.blocks)} blocks, {layout.ratio:.4f} times the bound",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    return figure
