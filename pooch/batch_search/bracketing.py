"""The largest of a row of sizes that fits, where asking costs much and the need grows nearly in proportion to the size.

A line through two known sizes says where the need should meet the room; that size and the next one are asked. Where the
need bends, the answers close in from both sides, and steps in the same direction grow, so that a bad line costs few
questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

MOST_INDEX = 2**20  # nothing that can be trained grows on beyond that
LONGEST_JUMP = 16  # times as far as anything that was asked


def largest_within(
    need: Callable[[int], float], room: float, asked_first: Iterable[int], *, most: int = MOST_INDEX
) -> int | None:
    """The largest index, from 0 on, whose need is within the room; None where not even the first one's is.

    Found is an index that fits while the next one does not. Where the need never falls, there is one such index alone.

    Args:
        need: of an index; each index is asked once at most.
        asked_first: indices to begin with; two of them give the first line.
        most: the last index that is asked.
    """
    search = _Search(need, room, most)
    for index in asked_first:
        search.ask(min(max(0, index), most))
    search.steps = 0
    while not search.is_done:
        search.ask(search.next_index())
    return search.low if search.low >= 0 else None


class _Search:
    """`low` fits (-1: nothing known does), `high` does not (`most` + 1: nothing known is too big)."""

    def __init__(self, need: Callable[[int], float], room: float, most: int) -> None:
        self._need = need
        self._room = room
        self._most = most
        self._known: dict[int, float] = {}
        self.steps = 0  # in a row that moved the same end since the first questions
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
        """Where the line meets the room; farther from an end that was moved several times in a row."""
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
        """The two known indices that are nearest to where the answer lies."""
        if self.low >= 0 and self.high <= self._most:
            return self.low, self.high
        if len(self._known) < 2:
            return None
        ordered = sorted(self._known)
        pair = ordered[-2:] if self.low >= 0 else ordered[:2]
        return pair[0], pair[1]
