"""Telling how far a long piece of work has got."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]  # is given one line at a time


def silent(text: str) -> None:
    """Nobody is told."""
