"""How long copies to and from the tier take, as seen so far: a latency and a rate in each direction.

Reading back may be several times slower or faster than writing. And small copies tell nothing of a rate, as nearly all
of their time is latency.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from .values import Ticket

_GUESSED_LATENCY_MS, _GUESSED_BYTES_PER_MS = 0.1, 1e6  # 1 GB/s
_LATENCY_WEIGHT = 0.1  # of the latest copy
# What counts of the past is told in bytes, so that many small copies do not outweigh what a large one has shown.
_GUESS_BYTES = 2**20  # as much as a guess counts
_PAST_BYTES = 2**26  # as much as all of the past counts at most, and a measurement
_MOST_FORGOTTEN = 0.2  # of the past, with one copy
_MOST_UNLIKE = 8.0  # times the time that was expected: a process may stand still in the middle of a copy
_MOST_UNTIMED = 8  # copies that compute waits for and that have not ended yet


class MeasuredLink(Protocol):
    """What was measured of the tier: see `pooch.ir.Link`."""

    @property
    def out_latency_ms(self) -> float:
        """Fixed cost of a copy to the tier."""

    @property
    def in_latency_ms(self) -> float:
        """Fixed cost of a copy from the tier."""

    @property
    def out_bytes_per_ms(self) -> float:
        """Rate of long copies to the tier."""

    @property
    def in_bytes_per_ms(self) -> float:
        """Rate of long copies from the tier."""

    @property
    def ranks(self) -> int:
        """Processes that share the rates."""


@dataclass(slots=True)
class Lane:
    """Copies in one direction.

    Attributes:
        latency_ms: What each copy takes, whatever its size.
        noted_bytes: How much of it comes from copies that were noted, and not from a guess or a measurement.
    """

    latency_ms: float = _GUESSED_LATENCY_MS
    noted_bytes: int = 0
    _seen_bytes: float = _GUESS_BYTES
    _seen_ms: float = _GUESS_BYTES / _GUESSED_BYTES_PER_MS

    def start_from(self, latency_ms: float, bytes_per_ms: float) -> None:
        """Begin with what was measured, unless copies in training have told more since."""
        if self.noted_bytes < _PAST_BYTES:
            self.latency_ms = latency_ms
            self._seen_bytes, self._seen_ms = _PAST_BYTES, _PAST_BYTES / bytes_per_ms

    @property
    def bytes_per_ms(self) -> float:
        """The rate of long copies."""
        return self._seen_bytes / self._seen_ms

    def copy_ms(self, size_bytes: int) -> float:
        """Expected time of a copy in ms."""
        return self.latency_ms + size_bytes * self._seen_ms / self._seen_bytes

    def note(self, size_bytes: int, copy_ms: float, copies: int = 1) -> None:
        """Take copies into account.

        Args:
            size_bytes: Their size, together.
            copy_ms: What they took, each from its own beginning on.
            copies: How many they are.
        """
        waited_ms = copies * self.latency_ms
        expected_ms = waited_ms + size_bytes * self._seen_ms / self._seen_bytes
        self.noted_bytes += size_bytes
        copy_ms = min(max(copy_ms, expected_ms / _MOST_UNLIKE), expected_ms * _MOST_UNLIKE)
        # Each takes its share of the error: of a small copy the latency nearly all, of a large one the rate.
        latency_share, moving_share = waited_ms / expected_ms, 1 - waited_ms / expected_ms
        weight = _LATENCY_WEIGHT if copies == 1 else 1 - (1 - _LATENCY_WEIGHT) ** copies
        self.latency_ms += weight * latency_share * (copy_ms - expected_ms) / copies
        kept = 1 - min(_MOST_FORGOTTEN, size_bytes / _PAST_BYTES)
        self._seen_bytes = kept * self._seen_bytes + size_bytes
        self._seen_ms = kept * self._seen_ms + moving_share * copy_ms


class CopySpeed:
    """A running estimate of what copies take.

    Args:
        tier: What the tier is. Also an attribute.

    Attributes:
        out: Copies to the tier.
        back: Copies from the tier.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.out, self.back = Lane(), Lane()
        self._untimed: deque[tuple[Ticket, int, bool]] = deque(maxlen=_MOST_UNTIMED)

    def start_from(self, link: MeasuredLink) -> None:
        """Begin with what was measured, in each direction of which training has not told more since."""
        self.out.start_from(link.out_latency_ms, link.out_bytes_per_ms / link.ranks)
        self.back.start_from(link.in_latency_ms, link.in_bytes_per_ms / link.ranks)

    def back_ms(self, size_bytes: int) -> float:
        """Expected time of a copy from the tier in ms."""
        return self.back.copy_ms(size_bytes)

    def leaving_ms(self, size_bytes: int, *, is_written: bool) -> float:
        """Expected time in ms of the copies of what leaves: to the tier and back, or only back if that is done."""
        back = self.back  # as `Lane.copy_ms` has it, which is not called: it is asked for each value that may leave
        back_ms = back.latency_ms + size_bytes * back._seen_ms / back._seen_bytes
        if is_written:
            return back_ms
        out = self.out
        return out.latency_ms + size_bytes * out._seen_ms / out._seen_bytes + back_ms

    def learn(self, ticket: Ticket, size_bytes: int, *, outwards: bool) -> None:
        """Take a copy into account that compute waits for, as soon as its time is known.

        On a device with streams, that is some time after this.

        Args:
            ticket: The copy.
            size_bytes: What it copies.
            outwards: Whether it goes to the tier.
        """
        if ticket.error is None and ticket.moved_bytes < size_bytes:
            return  # what packing takes tells nothing of the tier
        copy_ms = None if self._untimed or ticket.error is not None else ticket.copy_ms
        if copy_ms is not None:  # nothing before it is still to be timed, as on a CPU
            (self.out if outwards else self.back).note(size_bytes, copy_ms)
            return
        self._untimed.append((ticket, size_bytes, outwards))
        while self._untimed:
            ticket, size_bytes, outwards = self._untimed[0]
            if ticket.error is None:
                copy_ms = ticket.copy_ms
                if copy_ms is None:
                    return
                (self.out if outwards else self.back).note(size_bytes, copy_ms)
            self._untimed.popleft()
