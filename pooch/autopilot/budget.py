"""What a budget for a training loop may be."""

from __future__ import annotations

from ..api.budgets import is_smallest, parse_budget
from ..errors import UsageError
from ..units import parse_bytes


def budget_of(budget: int | str) -> tuple[int | None, float | None]:
    """Return the budget in bytes, or the share of the first step's in-core peak.

    Args:
        budget: Bytes, a text such as "16GiB", or a share such as "60%".

    Raises:
        UsageError: It does not parse.
    """
    if is_smallest(budget):
        raise UsageError(
            "the budget cannot be 'min' here, as nothing is known before the first step: give bytes or a %"
        )
    if isinstance(budget, str) and budget.strip().endswith("%"):
        parsed = parse_bytes(budget, whole_bytes=10**6)
        if parsed is None or not 0 < parsed <= 10**6:
            raise UsageError(f"the budget {budget!r} is no share: give a percentage such as 60%, or bytes")
        return None, parsed / 10**6
    return parse_budget(budget, None), None
