"""Bytes and milliseconds: parsing what people type and printing what people read."""

from __future__ import annotations

import re

from pooch.errors import UsageError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)\s*")


SMALLEST = "min"  # a budget in words: the smallest for which there is a plan


def is_smallest(budget: object) -> bool:
    """Whether a budget is asked for in words, as the smallest that there is a plan for."""
    return isinstance(budget, str) and budget.strip().lower() == SMALLEST


def parse_budget(budget: int | str, peak_bytes: int, *, name: str = "budget") -> int:
    """Turn a budget into bytes.

    Args:
        budget: a number of bytes, a text with a unit ("16GiB", "800MB"), or a share of the in-core peak ("60%").
        peak_bytes: the in-core peak that a percentage refers to.
        name: what to call it in an error.

    Raises:
        UsageError: the text does not parse, or the budget is not positive.
    """
    remedy = f"give a {name} such as 16GiB, 800MB, 60% or a number of bytes"
    if is_smallest(budget):
        raise UsageError(f"the {name} cannot be {SMALLEST!r}: {remedy}")
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise UsageError(f"the {name} {budget!r} is neither a number of bytes nor a text: {remedy}")
    if isinstance(budget, int):
        parsed = budget
    else:
        match = _PATTERN.fullmatch(budget)
        unit = match.group(2).lower() if match else ""
        if match is None or (unit != "%" and unit not in _FACTORS):
            raise UsageError(f"the {name} {budget!r} does not parse: {remedy}")
        number = float(match.group(1))
        parsed = int(number * peak_bytes / 100) if unit == "%" else int(number * _FACTORS[unit])
    if parsed <= 0:
        raise UsageError(f"the {name} {budget!r} is not positive: {remedy}")
    return parsed


def absolute_bytes(text: int | str, name: str) -> int:
    """As `parse_budget`, where there is no one peak that a percentage could be of.

    Args:
        text: a number of bytes, or a text with a unit.
        name: what to call it in an error.

    Raises:
        UsageError: it is a percentage, does not parse, or is not positive.
    """
    if isinstance(text, str) and text.strip().endswith("%"):
        raise UsageError(f"the {name} {text!r} is a share, but nothing is known yet of what: give bytes, such as 16GiB")
    return parse_budget(text, 0, name=name)


def format_bytes(number: int | float) -> str:
    """Bytes for people, in binary units: 1536 -> "1.50 KiB"."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_ms(milliseconds: float) -> str:
    """Milliseconds for people: 0.0123 -> "12.3 us", 1234.5 -> "1.234 s"."""
    if abs(milliseconds) >= 1000:
        return f"{milliseconds / 1000:.3f} s"
    if abs(milliseconds) >= 1 or milliseconds == 0:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds * 1000:.1f} us"


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not less than `number`."""
    return -(-number // multiple) * multiple
