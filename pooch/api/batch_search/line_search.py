"""Find the largest index whose need is within the room, where each need is expensive to compute and nearly affine.

A line through two known indices predicts where the need meets the room; the search computes the need there and at the
next index. Where the need is not affine, the search closes in from both sides, and repeated steps in one direction
grow, so that a poor line costs few computations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

MOST_INDEX = 2**20  # far beyond anything that can be trained
LONGEST_JUMP = 16  # as a multiple of the largest known index


def largest_within(
    need: Callable[[int], float], room: float, asked_first: Iterable[int], *, most: int = MOST_INDEX
) -> int | None:
    """The largest index, from 0 up to `most`, whose need is within the room; None if not even that of index 0 is.

    The index that is found fits and the next one does not. If the need never falls, there is only one such index. The
    need of an index is computed at most once. The search begins with the indices asked first; two of them give the
    first line.
    """
    search = _Search(need, room, most)
    for index in asked_first:
        search.ask(min(max(0, index), most))
    search.steps = 0
    while not search.is_done:
        search.ask(search.next_index())
    return search.low if search.low >= 0 else None


class _Search:
    """State of a search.

    Attributes:
        low: the largest known index that fits, or -1.
        high: the smallest known index that does not fit, or `most` + 1.
        steps: how many needs in a row moved the same end: positive for `low`, negative for `high`.
    """

    def __init__(self, need: Callable[[int], float], room: float, most: int) -> None:
        self._need = need
        self._room = room
        self._most = most
        self._known: dict[int, float] = {}
        self.steps = 0
        self.low = -1
        self.high = most + 1

    @property
    def is_done(self) -> bool:
        return self.high - self.low <= 1

    def ask(self, index: int) -> None:
        if index in self._known:
            return
        self._known[index] = self._need(index)
        if self._known[index] <= self._room:
            self.steps = self.steps + 1 if self.steps > 0 else 1
            self.low = max(self.low, index)
        else:
            self.steps = self.steps - 1 if self.steps < 0 else -1
            self.high = min(self.high, index)

    def next_index(self) -> int:
        """Where the line meets the room, or farther away from an end that moved several times in a row."""
        guess = self._predicted()
        if self.steps > 2:
            guess = max(guess, self.low + 2 ** (self.steps - 2))
        elif self.steps < -2:
            guess = min(guess, self.high - 2 ** (-self.steps - 2))
        if abs(self.steps) > 3 and self.high <= self._most:
            guess = (self.low + self.high) // 2
        farthest = LONGEST_JUMP * (max(self._known, default=0) + 1)
        return min(max(guess, self.low + 1), self.high - 1, max(farthest, self.low + 1))

    def _predicted(self) -> int:
        pair = self._line()
        if pair is None:
            return 2 * self.low + 2 if self.low >= 0 else self.high // 2
        first, second = pair
        slope = (self._known[second] - self._known[first]) / (second - first)
        if slope <= 0:
            return self._most
        return math.floor(min(self._most, first + (self._room - self._known[first]) / slope))

    def _line(self) -> tuple[int, int] | None:
        """The two known indices nearest to the answer."""
        if self.low >= 0 and self.high <= self._most:
            return self.low, self.high
        if len(self._known) < 2:
            return None
        ordered = sorted(self._known)
        pair = ordered[-2:] if self.low >= 0 else ordered[:2]
        return pair[0], pair[1]
