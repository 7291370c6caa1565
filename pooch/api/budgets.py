"""Budgets as people write them, in bytes."""

from __future__ import annotations

from numbers import Integral, Real

from ..ground.errors import UsageError
from ..ground.units import MOST_BYTES, parse_bytes
from ..ground.visible import one_line

SMALLEST = "min"
FREE = "auto"
FEWEST_BYTES = 1024  # no model trains in less: whoever writes 16 means 16 GiB, or 16%
_FEWEST_SHARE = 100  # a step of a few bytes, as in a test, may have a budget of fewer still, but not a hundredth


def is_smallest(budget: object) -> bool:
    """Whether a budget asks for the smallest one that has a plan."""
    return isinstance(budget, str) and budget.strip().lower() == SMALLEST


def is_free(budget: object) -> bool:
    """Whether a budget asks for what is free now."""
    return isinstance(budget, str) and budget.strip().lower() == FREE


def parse_budget(
    budget: object,
    peak_bytes: int | None,
    *,
    name: str = "budget",
    takes_share: bool | None = None,
    fewest_bytes: int | None = None,
) -> int:
    """Convert a budget to bytes.

    Args:
        budget: a number of bytes, a text with a unit ("16GiB", "16 GB", "800MB"), or a share of the in-core peak
            ("60%"). Fewer than 1024 bytes are refused if they are less than 1% of the in-core peak, or if that is not
            known: 16 is more likely to mean "16GiB" or "16%" than 16 bytes.
        peak_bytes: the in-core peak that a percentage refers to. None: not known, so a percentage is an error.
        name: what to call the budget in an error.
        takes_share: whether an error may propose a percentage. None: where the in-core peak is known.
        fewest_bytes: a budget of fewer bytes is refused. None: of fewer than `FEWEST_BYTES`.

    Raises:
        UsageError: the text does not parse, or the budget is not positive or too small to be meant.
    """
    fewest_bytes = FEWEST_BYTES if fewest_bytes is None else fewest_bytes
    if peak_bytes is not None:
        fewest_bytes = min(fewest_bytes, peak_bytes // _FEWEST_SHARE)
    asked = _Asked(budget, name, peak_bytes is not None if takes_share is None else takes_share)
    for word, is_asked in ((SMALLEST, is_smallest), (FREE, is_free)):
        if is_asked(budget):
            raise UsageError(f"the {name} cannot be {word!r}: {asked.remedy}")
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return asked.positive(_share(asked, budget, peak_bytes))
    if isinstance(budget, bool) or not isinstance(budget, Real | str):
        raise UsageError(f"the {name} is of type {type(budget).__name__}, not a number or a text: {asked.remedy}")
    if not isinstance(budget, str):
        return asked.meant(int(budget) if isinstance(budget, Integral) else float(budget), fewest_bytes)
    number = parse_bytes(budget)
    if number is None:
        raise asked.not_parsed()
    return asked.meant(number, fewest_bytes)


def check_budget(budget: float | str) -> None:
    """Refuse a budget for a step that nobody can mean, before anything is known of the step.

    Raises:
        UsageError: as `parse_budget`.
    """
    if not (is_smallest(budget) or is_free(budget)):
        parse_budget(budget, MOST_BYTES >> 20)


def _share(asked: _Asked, budget: str, peak_bytes: int | None) -> float:
    if peak_bytes is None:
        raise UsageError(
            f"the {asked.name} {budget!r} is a share, but nothing is known yet of what: give bytes, such as 16GiB"
        )
    share_bytes = parse_bytes(budget, whole_bytes=peak_bytes)
    if share_bytes is None:
        raise asked.not_parsed()
    return share_bytes


class _Asked:
    """A budget as somebody wrote it, and what to answer where that cannot be meant.

    Args:
        budget: the number or text.
        name: what it is called.
        takes_share: whether it could also be a percentage.
    """

    def __init__(self, budget: object, name: str, takes_share: bool) -> None:
        self.budget, self.name, self._takes_share = budget, name, takes_share
        shares = ", 60%" if takes_share else ""
        self.remedy = f"give a {name} such as 16GiB, 800MB{shares} or a number of bytes"

    def positive(self, number: float) -> int:
        """The bytes, if there are any.

        Raises:
            UsageError: there are not.
        """
        if not number > 0:
            raise UsageError(f"the {self.name} {self.budget!r} is not positive: {self.remedy}")
        if number >= MOST_BYTES:
            raise UsageError(f"the {self.name} {one_line(str(self.budget))} is beyond all memory: {self.remedy}")
        if number < 1:
            raise UsageError(f"the {self.name} {self.budget} is less than a byte: {self._instead(number)}")
        return int(number)

    def meant(self, number: float, fewest_bytes: int) -> int:
        """The bytes, if they are enough to be meant.

        Raises:
            UsageError: they are not.
        """
        found = self.positive(number)
        is_whole = number == found or number >= FEWEST_BYTES  # half a byte more than a few is never meant
        if found >= fewest_bytes and is_whole:
            return found
        guesses = [f'"{number:g}GiB"', f'"{number:g}%"'] if number <= 100 else [f'"{number:g}MiB"']
        guess = " or ".join(guesses if self._takes_share else guesses[:1])
        plural = "" if number == 1 else "s"
        raise UsageError(f"the {self.name} {self.budget} is {number:g} byte{plural}: did you mean {guess}?")

    def not_parsed(self) -> UsageError:
        """The error for a text that is no budget."""
        return UsageError(f"the {self.name} {self.budget!r} does not parse: {self.remedy}")

    def _instead(self, number: float) -> str:
        """What to write for a number below 1: it is meant as a share, unless it has a unit."""
        has_unit = isinstance(self.budget, str) and not self.budget.strip()[-1].isdigit()
        return f'write "{number * 100:g}%"' if self._takes_share and not has_unit else self.remedy
