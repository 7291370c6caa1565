"""The built-in workloads with their published sizes. Importing this imports no model and no torch."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..ground.errors import FileFormatError
from ..ground.plugins import provided
from ..ground.reading import packaged_tables
from .registry import BuiltIn, Growth, Preset

FILE = "workloads.toml"


def packaged_workloads(package: str) -> tuple[BuiltIn, ...]:
    """The workloads in `workloads.toml` of a package, whose networks are modules of that package.

    Types of fields are checked by a test: importing what checks them takes longer than listing the workloads.

    Raises:
        FileFormatError: an entry lacks a field, or has one that there is not.
    """
    entries = packaged_tables(package, FILE)["workloads"]
    try:
        return tuple(_entry(package, **entry) for entry in entries)
    except TypeError as error:
        raise FileFormatError(f"{FILE} of {package}: {error}: correct it") from error


def _entry(
    models: str, *, module: str, growths: list[dict[str, Any]], presets: list[dict[str, Any]], **others: Any
) -> BuiltIn:
    return BuiltIn(
        module=f"{models}.{module}",
        growths=tuple(Growth(**each) for each in growths),
        presets=tuple(Preset(**each) for each in presets),
        **others,
    )


@cache
def built_in_workloads() -> dict[str, BuiltIn]:
    """Pooch's own workloads and those of optional packages, by name."""
    own = packaged_workloads(f"{__package__}.models")
    added = (entry for each in provided("workloads").values() for entry in each.load())
    return {entry.name: entry for entry in (*own, *added)}
