"""Bytes and milliseconds: parsing and formatting."""

from __future__ import annotations

import math
import re

MOST_RANKS = 1 << 20  # processes that share a link
MOST_BYTES = 1 << 60  # sums of larger numbers would not fit into 64 bits; no machine comes near them
_FACTORS = {
    "": 1,
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix + end: 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("", "ib")},
}
_PATTERN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)\s*")


def parse_bytes(text: str, *, whole_bytes: int | None = None) -> int | float | None:
    """Convert a text such as "16GiB", "16 GB" or "1048576" to bytes; None if it does not parse.

    Args:
        text: a number, with or without a unit.
        whole_bytes: what a percentage refers to. None: percentages do not parse.

    Returns:
        Whole bytes, or the fraction where there is less than one.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    number, unit = float(match.group(1)), match.group(2).lower()
    if unit == "%":
        return None if whole_bytes is None else _whole(number * whole_bytes / 100)
    return _whole(number * _FACTORS[unit]) if unit in _FACTORS else None


def _whole(number: float) -> int | float:
    return int(number) if math.isfinite(number) and abs(number) >= 1 else number


def format_bytes(number: int | float) -> str:
    """Format bytes in binary units: 1536 -> "1.50 KiB"."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_ms(milliseconds: float) -> str:
    """Format milliseconds: 0.0123 -> "12.3 us", 1234.5 -> "1.234 s"."""
    if abs(milliseconds) >= 1000:
        return f"{milliseconds / 1000:.3f} s"
    if abs(milliseconds) >= 1 or milliseconds == 0:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds * 1000:.1f} us"


def plural(number: int, what: str) -> str:
    """A number of things: 1, "step" -> "1 step"; 2, "step" -> "2 steps"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not less than `number`."""
    return -(-number // multiple) * multiple
