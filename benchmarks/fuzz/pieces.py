"""All ordinary pieces, by name, in the order in which seeds choose among them."""

from __future__ import annotations

from benchmarks.fuzz import layers, operators
from benchmarks.fuzz.piece import PIECES

__all__ = ["PIECES", "layers", "operators"]
