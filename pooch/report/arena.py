"""A picture of a layout: blocks over time and offset."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from ..packing import Block, Layout
from ..units import format_bytes
from .colours import BOUND, BUDGET, KINDS

_SHADES = (KINDS["op"], KINDS["copy"], KINDS["replay"], BOUND, "#CC79A7", "#F0E442")
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
