"""How a script runs under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Governing:
    """How a script runs under a budget, as the command line has it.

    Attributes:
        budget: The budget.
        options: Further arguments of the `ModelFinder`.
        report: The page to write, or None.
        quiet: Whether nothing is printed.
        verbose: Whether what Pooch did inside of the steps is printed too.
        script: What is run.
        typed: The command line.
    """

    budget: str
    options: Mapping[str, Any]
    report: Path | None
    quiet: bool
    verbose: bool
    script: str
    typed: str
