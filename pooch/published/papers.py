"""The figures of the papers, with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..ground.reading import packaged_tables

Unit = Literal["slowdown", "multiple", "size", "overhead_cut", "time_cut", "peak_mb"]
Known = Literal["read", "abstract", "recalled"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One figure of a paper.

    Attributes:
        experiment: name of the experiment in which it is shown.
        row: key of the row beside which it is shown.
        method: the method that it is for.
        unit: "slowdown": time lost compared with in-core; "multiple": of the in-core size; "size": of the setting that
            grows; "overhead_cut", "time_cut": the share of overhead or time saved; "peak_mb": megabytes.
        value: the figure.
        known: "read", "abstract" (only the abstract was available) or "recalled" (from memory).
        source: the paper and the circumstances.
        stock: the figure without the method, if the paper gives it.
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
        """The factor by which the size grew; None if the paper does not give it."""
        if self.unit == "multiple":
            return self.value
        return self.value / self.stock if self.unit == "size" and self.stock else None

    @property
    def text(self) -> str:
        """The figure as it appears in a table."""
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
    """Return all figures, in the order of the file."""
    return tuple(PublishedFigure(**entry) for entry in packaged_tables(__package__, "papers.toml")["figure"])


def published_figure(experiment: str, row: str) -> PublishedFigure | None:
    """Return the paper's figure for a row, or None if the paper gives none."""
    found = (each for each in published_figures() if (each.experiment, each.row) == (experiment, row))
    return next(found, None)
