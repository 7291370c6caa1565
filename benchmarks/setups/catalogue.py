"""All setups, in the order of the table."""

from __future__ import annotations

from benchmarks.setups import distributed, loops, several, with_lightning, with_monai, with_transformers
from benchmarks.setups.setup import REGISTERED

_FAMILIES = (loops, several, distributed, with_transformers, with_lightning, with_monai)
_HOMES = [family.__name__ for family in _FAMILIES]
SETUPS = dict(sorted(REGISTERED.items(), key=lambda item: _HOMES.index(item[1].train.__module__)))
