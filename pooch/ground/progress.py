"""Reporting how far a long piece of work has got."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]  # called with one line at a time
PlanningProgress = Callable[[str, float], None]  # also with the share of the work that is done, from 0 to 1


def silent(text: str, share: float = 0.0) -> None:
    """Report nothing."""
