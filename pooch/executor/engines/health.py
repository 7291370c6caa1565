"""What is wrong with a swap tier: each kind of fault is told once, and steps are kept away from a tier that fails."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Callable

from ...ground.errors import TierError
from ...ground.units import format_bytes
from ...ground.visible import visible

BY_LIMIT = "limit"  # the kind of fault that is none: the tier may not take more
_FATE = "until then activations stay or are computed again, which may exceed the budget"
_FIRST_LOOK, _LATER = 8, 8  # steps from a fault to the next look at the tier, and how many times longer each time

FAR_SLOWER = 4.0
_COPIES = 16  # whose median counts: a copy may stand still because the whole process does
_LEAST_S = 0.5  # of copying in all of them: less is not worth a word
LEAST_BYTES = 2**16  # of a copy: of smaller ones the latency is all that there is


class CopyRates:
    """How fast copies are, as the thread that makes them sees it."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[tuple[float, float]]] = {way: deque(maxlen=_COPIES) for way in (True, False)}
        self._usual: dict[bool, float] = {}

    def note(self, outwards: bool, size_bytes: int, elapsed_s: float) -> None:
        """Note a copy."""
        if size_bytes >= LEAST_BYTES and elapsed_s > 0:
            self._seen[outwards].append((size_bytes / elapsed_s, elapsed_s))

    def slower(self) -> tuple[bool, float, float] | None:
        """Return a way in which copies have become far slower than usual, their rate, and the usual one in bytes/s."""
        for outwards, seen in self._seen.items():
            copies = list(seen)
            if len(copies) < _COPIES:
                continue
            rate = statistics.median(rate for rate, _ in copies)
            usual = self._usual.setdefault(outwards, rate)  # that of the first copies
            if rate * FAR_SLOWER < usual and sum(elapsed_s for _, elapsed_s in copies) >= _LEAST_S:
                return outwards, rate, usual
        return None


class TierHealth:
    """What is wrong with a tier.

    Args:
        name: The tier as messages name it.
        another: How to choose another one.
        explain: Returns what is wrong, in one line that names the remedy. Also an attribute.

    Attributes:
        tell: Called with one line for each kind of fault. Allocations may ask for room in the middle of an op, and the
            tier fail there: whoever cannot be called at such a time collects the lines.
        fault: The latest fault since the step began, or None.
        known: The latest fault of all, if the tier was not seen to work since, or None.
        rates: How fast copies are.
    """

    def __init__(self, name: str, another: str, explain: Callable[[BaseException], TierError]) -> None:
        self._name, self._another, self.explain = name, another, explain
        self.tell: Callable[[str], None] = _warn
        self.fault: TierError | None = None
        self.known: TierError | None = None
        self.rates = CopyRates()
        self._told: set[str] = set()
        self._steps = self._look_at = 0

    def failed(self, error: BaseException, *, is_told: bool = True) -> TierError:
        """Note a fault, and return what is wrong.

        Args:
            error: What went wrong.
            is_told: Whether to tell it now. Otherwise the caller raises it.
        """
        explained = self.explain(error)
        # Without a traceback, whose frames would hold the bytes that could not leave.
        self.fault = fault = TierError(str(explained), explained.kind)
        if fault.kind == BY_LIMIT:
            return fault
        if self.known is None:
            self._steps, self._look_at = 0, _FIRST_LOOK
        self.known = fault
        if fault.kind not in self._told and is_told:
            self._told.add(fault.kind)
            self.tell(f"{fault}; {_FATE}")
        return fault

    def begin_step(self, probe: Callable[[], bool]) -> bool:
        """Begin a step, and return whether it may count on the tier. One that failed is looked at now and then.

        Args:
            probe: Whether the tier can be written.
        """
        self.fault = None
        if self.known is not None:
            self._steps += 1
            if self._steps >= self._look_at:
                self._look_at *= _LATER
                if probe():
                    self.known = None
        return self.known is None

    def end_step(self, *, has_copied: bool) -> None:
        """End a step.

        Args:
            has_copied: Whether the tier was written.
        """
        if has_copied and self.fault is None:
            self.known = None
        self.tell_if_slow()

    def tell_if_slow(self) -> None:
        """Tell, once, if copies are far slower than they were."""
        if "slow" in self._told or (found := self.rates.slower()) is None:
            return
        outwards, rate, usual = found
        self._told.add("slow")
        self.tell(
            f"{self._name} is slow: copies {'to' if outwards else 'from'} it run at {_per_second(rate)}, where "
            f"{_per_second(usual)} were measured: {self._another}, or profile and plan again"
        )


def _per_second(rate: float) -> str:
    return f"{format_bytes(int(rate))}/s"


def _warn(text: str) -> None:
    warnings.warn(visible(text), stacklevel=3)
