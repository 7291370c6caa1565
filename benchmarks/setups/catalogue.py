"""All setups, in the order of the table."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.setups import distributed, loops, several, with_lightning, with_monai, with_transformers
from benchmarks.setups.setup import REGISTERED, Setup

_FAMILIES = (loops, several, distributed, with_transformers, with_lightning, with_monai)
_HOMES = [family.__name__ for family in _FAMILIES]
_ALSO_BY_EXEC = ("plain-loop", "gan", "data-parallel", "trainer-everything", "sft-lora", "lightning-module")


def _by_exec(name: str) -> Setup:
    """The same script, run by `pooch exec`."""
    shows = f"the script of {name}, run by `pooch exec --budget`"
    return replace(REGISTERED[name], name=f"{name}-exec", shows=shows, by_exec=True)


SETUPS = dict(sorted(REGISTERED.items(), key=lambda item: _HOMES.index(item[1].train.__module__)))
SETUPS |= {setup.name: setup for setup in map(_by_exec, _ALSO_BY_EXEC)}
