"""The papers' own figures: data, with where each stands and how it is known."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Unit = Literal["slowdown", "multiple", "size", "overhead_cut", "time_cut", "peak_mb"]
Known = Literal["read", "abstract", "recalled"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One figure of a paper.

    Attributes:
        experiment, row: beside which row of ours it stands. method: whose it is.
        unit: "slowdown": time lost over in-core; "multiple": of the in-core size; "size": of the grown setting;
            "overhead_cut", "time_cut": share of it that went away; "peak_mb": megabytes.
        value: the figure. stock: the same before, where the paper has it.
        known: "read", "abstract" (nothing else was at hand) or "recalled". source: paper and circumstances.
    """

    experiment: str
    row: str
    method: str
    unit: Unit
    value: float
    known: Known
    source: str
    stock: float | None = None

    @property
    def multiple(self) -> float | None:
        """By how much the size grew, where the paper tells."""
        if self.unit == "multiple":
            return self.value
        return self.value / self.stock if self.unit == "size" and self.stock else None

    @property
    def text(self) -> str:
        """For a table."""
        if self.unit in ("slowdown", "overhead_cut", "time_cut"):
            sign = "+" if self.unit == "slowdown" else "-"
            return f"{sign}{100 * self.value:g}%"
        if self.unit == "multiple":
            return f"{self.value:g}x"
        unit = " MB" if self.unit == "peak_mb" else ""
        before = f"{self.stock:g} -> " if self.stock else ""
        multiple = f" ({self.multiple:.2f}x)" if self.multiple else ""
        return f"{before}{self.value:g}{unit}{multiple}"


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """All of them, in the order of the file."""
    text = (files(__package__) / "papers.toml").read_text()
    return tuple(PublishedFigure(**entry) for entry in tomllib.loads(text)["figure"])


def published_figure(experiment: str, row: str) -> PublishedFigure | None:
    """The paper's figure for a row, or None where the paper has none."""
    found = (each for each in published_figures() if (each.experiment, each.row) == (experiment, row))
    return next(found, None)
