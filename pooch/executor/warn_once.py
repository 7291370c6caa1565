"""Warnings that come once under a run."""

from __future__ import annotations

import warnings
from collections.abc import Hashable


class WarnOnce:
    """Warns of a topic the first time; what later steps meet is counted in their stats alone."""

    def __init__(self) -> None:
        self._told: set[Hashable] = set()

    def __call__(self, topic: Hashable, text: str) -> None:
        """Warn, unless the topic was told."""
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(text, stacklevel=3)
