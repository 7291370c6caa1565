"""What training under a plan came to. Reads any report dataclass whose field names carry their units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pooch.report.summaries import Record
from pooch.report.tables import facts_table
from pooch.units import format_bytes, format_ms

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def training_record(report: DataclassInstance) -> Record:
    """For `--json`: every field, by its name."""
    return {name: _for_json(value) for name, value in asdict(report).items()}


def training_table(report: DataclassInstance) -> Table:
    """For people: every field, written with its unit."""
    facts = {_heading(name): _told(name, value) for name, value in asdict(report).items() if value is not None}
    return facts_table("training", facts)


def _heading(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_ms").replace("_", " ")


def _told(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_told(name, each) for each in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{_heading(key)} {_told(key, each)}" for key, each in value.items()) or "none"
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and name.endswith("_ms"):
        return format_ms(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _for_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_for_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _for_json(each) for key, each in value.items()}
    return value
