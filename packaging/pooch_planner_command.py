"""Where the command `pooch` begins: in the installed package, or in the one of a checkout."""

from __future__ import annotations

try:
    from pooch_planner.cli import main
except ModuleNotFoundError:
    from pooch.cli import main

__all__ = ["main"]
