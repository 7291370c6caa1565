"""Budgets as people write them, in bytes."""

from __future__ import annotations

from ..errors import UsageError
from ..units import parse_bytes

SMALLEST = "min"


def is_smallest(budget: object) -> bool:
    """Whether a budget asks for the smallest one that has a plan."""
    return isinstance(budget, str) and budget.strip().lower() == SMALLEST


def parse_budget(budget: int | str, peak_bytes: int | None, *, name: str = "budget") -> int:
    """Convert a budget to bytes.

    Args:
        budget: a number of bytes, a text with a unit ("16GiB", "800MB"), or a share of the in-core peak ("60%").
        peak_bytes: the in-core peak that a percentage refers to. None: not known, so a percentage is an error.
        name: what to call the budget in an error.

    Raises:
        UsageError: the text does not parse, or the budget is not positive.
    """
    remedy = f"give a {name} such as 16GiB, 800MB, 60% or a number of bytes"
    if is_smallest(budget):
        raise UsageError(f"the {name} cannot be {SMALLEST!r}: {remedy}")
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise UsageError(f"the {name} {budget!r} is neither a number of bytes nor a text: {remedy}")
    if peak_bytes is None and isinstance(budget, str) and budget.strip().endswith("%"):
        raise UsageError(
            f"the {name} {budget!r} is a share, but nothing is known yet of what: give bytes, such as 16GiB"
        )
    parsed = budget if isinstance(budget, int) else parse_bytes(budget, whole_bytes=peak_bytes)
    if parsed is None:
        raise UsageError(f"the {name} {budget!r} does not parse: {remedy}")
    if parsed <= 0:
        raise UsageError(f"the {name} {budget!r} is not positive: {remedy}")
    return parsed
