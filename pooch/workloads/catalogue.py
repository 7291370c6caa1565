"""The built-in workloads with their published sizes. Importing this imports no model and no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..ir.data_files import checked_entry, packaged_tables
from ..plugins import provided
from .registry import BuiltIn

FILE = "workloads.toml"


def packaged_workloads(package: str) -> tuple[BuiltIn, ...]:
    """The workloads in `workloads.toml` of a package, whose networks are modules of that package.

    Raises:
        FileFormatError: an entry is not as it should be.
    """
    entries = packaged_tables(package, FILE)["workloads"]
    read = (checked_entry(BuiltIn, entry, f"{FILE}: {entry.get('name')}") for entry in entries)
    return tuple(replace(each, module=f"{package}.{each.module}") for each in read)


@cache
def built_in_workloads() -> dict[str, BuiltIn]:
    """Pooch's own workloads and those of optional packages, by name."""
    own = packaged_workloads(f"{__package__}.models")
    added = (entry for each in provided("workloads").values() for entry in each.load())
    return {entry.name: entry for entry in (*own, *added)}
