"""Words that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from .units import format_bytes, plural


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """What to say of a name that does not exist: the closest names, or all of them if none is close.

    Args:
        name: what was given.
        known: the names that exist.
        cutoff: how similar a name has to be, from 0 to 1.
    """
    names = list(known)
    by_lower = {each.lower(): each for each in names}
    close = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(names)}"


def why_no_file(path: Path) -> str:
    """Return what a path is that is not one of a file, as the end of a sentence."""
    if path.is_dir():
        return "is a folder"
    return "is not a regular file" if path.exists() else "does not exist"


def error_text(error: BaseException, otherwise: str = "") -> str:
    """Return what a library says of a failure, which may be long, in one line of at most 300 characters.

    It is a part of a sentence, so it loses the point at its end. Of what is longer the middle is left out: some begin
    with the cause, and others end with it, after a signature in C++.

    Args:
        error: the failure.
        otherwise: what to return for an error without a message.
    """
    text = " ".join(str(error).split()).removesuffix(".") or otherwise
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-145:]}"


def slower(ratio: float) -> str:
    """A time over another one in words: 1.012 -> "1% slower", 0.5 -> "50% faster", 2.5 -> "2.5 times as long"."""
    if ratio >= 2:
        return f"{ratio:.1f} times as long"
    percent = round(100 * (ratio - 1))
    if percent == 0:
        return "just as fast"
    return f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}"


def slower_than(ratio: float, other: str) -> str:
    """A time over another one in words, with the other: "1% slower than plain steps"."""
    text = slower(ratio)
    return f"{text} {'than' if text.endswith(('slower', 'faster')) else 'as'} {other}"


def slower_than_predicted(ratio: float, predicted: float | None) -> str:
    """A measured time over the plain one beside its prediction: "4% slower, predicted 2%"."""
    measured = slower(ratio)
    if predicted is None:
        return measured
    expected = slower(predicted)
    for direction in (" slower", " faster"):
        if measured.endswith(direction):
            expected = expected.removesuffix(direction)
    return f"{measured}, predicted {expected}"


def of_budget(peak_bytes: int, budget_bytes: int) -> str:
    """A peak beside its budget: "64.96 of 64.99 MiB"."""
    (peak, unit), (budget, budget_unit) = (format_bytes(each).split() for each in (peak_bytes, budget_bytes))
    return f"{peak} of {budget} {unit}" if unit == budget_unit else f"{peak} {unit} of {budget} {budget_unit}"


def in_all(steps: int) -> str:
    """Every one of some steps: "in all 10 steps"."""
    return {1: "in the one step", 2: "in both steps"}.get(steps, f"in all {plural(steps, 'step')}")


def budget_verdict(peak_bytes: int, budget_bytes: int, steps: int, steps_over: int, rounding_bytes: int = 0) -> str:
    """Whether a budget was held: "Budget held: 64.96 of 64.99 MiB in all 10 steps".

    Args:
        peak_bytes: the highest peak of the steps.
        budget_bytes: the budget.
        steps: number of steps.
        steps_over: number of steps over the budget.
        rounding_bytes: the part of the peak that a caching allocator has added by rounding.
    """
    beside, over_bytes = of_budget(peak_bytes, budget_bytes), peak_bytes - budget_bytes
    exceeded = f"in {steps_over:,} of {plural(steps, 'step')}"
    if steps_over and over_bytes <= rounding_bytes:
        return f"Budget exceeded {exceeded}, before the optimizer's state counted towards it: {beside}"
    if steps_over:
        return f"Budget exceeded by {format_bytes(over_bytes - rounding_bytes)} {exceeded}: {beside}"
    if over_bytes > 0:
        return f"Budget held {in_all(steps)}, but for the allocator's rounding: {beside}"
    return f"Budget held: {beside} {in_all(steps)}"
