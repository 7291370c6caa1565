"""The `plot` methods of profiles, plans and timelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from ..ir import Plan, Profile, Timeline
from .figures import check_figure_path, draw_plan, draw_profile, draw_timeline, save_figure

_Path = str | Path | None


def profile_figure(profile: Profile, path: _Path = None, *, depth: int | None = 2) -> Figure:
    """`Profile.plot`."""
    return _drawn(lambda: draw_profile(profile, depth=depth), path)


def plan_figure(plan: Plan, profile: Profile, path: _Path = None) -> Figure:
    """`Plan.plot`."""
    return _drawn(lambda: draw_plan(profile, plan), path)


def timeline_figure(timeline: Timeline, path: _Path = None) -> Figure:
    """`Timeline.plot`."""
    return _drawn(lambda: draw_timeline(timeline), path)


def _drawn(draw: Callable[[], Figure], path: _Path) -> Figure:
    """The figure, written to its file. A notebook shows it also if `matplotlib.pyplot` was never imported."""
    if path is not None:
        check_figure_path(path)  # before anything is drawn
    figure = draw()
    if path is not None:
        save_figure(figure, path)
    vars(figure)["_repr_png_"] = partial(_png, figure)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
