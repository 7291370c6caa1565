"""Training under a budget without a plan made beforehand: `pooch.auto`.

Names are imported when they are first used (PEP 562): the process that plans beside training imports `jobs` alone, and
is ready much sooner without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autopilot import Auto as Auto
    from .autopilot import auto as auto
    from .summary import AutoSummary as AutoSummary
    from .summary import PlannedShape as PlannedShape

_HOMES = {"Auto": "autopilot", "AutoSummary": "summary", "PlannedShape": "summary", "auto": "autopilot"}

__all__ = ["Auto", "AutoSummary", "PlannedShape", "auto"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
    globals()[name] = value
    return value
