"""The built-in workloads with their published sizes. Importing this imports no model and no torch."""

from __future__ import annotations

from functools import cache

from ...plugins import provided
from ..registry import BuiltIn
from .images import IMAGES
from .sequences import SEQUENCES
from .volumes import VOLUMES


@cache
def built_in_workloads() -> dict[str, BuiltIn]:
    """Pooch's own workloads and those of optional packages, by name."""
    added = (entry for each in provided("workloads").values() for entry in each.load())
    return {entry.name: entry for entry in (*IMAGES, *VOLUMES, *SEQUENCES, *added)}
