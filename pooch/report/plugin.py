"""What reports add to profiles, plans and timelines: how notebooks show them, and what their methods draw."""

from __future__ import annotations

from ..ground.plugins import Plugin, Provided


def _notebook(kind: str) -> Provided:
    return Provided(f"{__package__}.notebook", f"{kind}_html")


def _plot(kind: str) -> Provided:
    return Provided(f"{__package__}.plots", f"{kind}_figure")


PLUGIN = Plugin(
    views={
        "profile_html": _notebook("profile"),
        "plan_html": _notebook("plan"),
        "timeline_html": _notebook("timeline"),
        "profile_figure": _plot("profile"),
        "plan_figure": _plot("plan"),
        "timeline_figure": _plot("timeline"),
        "plan_page": Provided(f"{__package__}.page.writing", "write_report"),
    },
)
