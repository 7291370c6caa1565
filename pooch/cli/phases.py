"""How far a command has got, from the lines of progress: which phase, for how long, and how long it may still take."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

_SHARE = re.compile(r"\s*\((\d+)%\)$")
_COUNT = re.compile(r"^(?P<phase>.*?)s?,?\s*(?:round )?(?P<number>\d+) of (?P<most>\d+)$")
_ROUND = re.compile(r", round \d+$")
_SURE_S = 2.0  # after which what is left is estimated
FIRST_SIGN_S = 10.0  # after which a phase that goes on is told; then after twice as long, and so on
SHORTEST_S = 1.0  # phases that are told at their end


class Phases:
    """The phase that a command is in.

    Args:
        limits_s: The time that phases may take whose names begin so, together.
        clock: The time in seconds.

    Attributes:
        name: The phase; "" before the first one.
        share: The share of it that is done, or None if it is not known.
    """

    def __init__(self, limits_s: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits_s, self._clock = dict(limits_s), clock
        self.name, self._text, self.share = "", "", None  # type: str, str, float | None
        self._begin_s = self._phase_s = clock()
        self._limited_s: dict[str, float] = {}  # when the first phase of each limit began

    @property
    def elapsed_s(self) -> float:
        """Time since the beginning of all."""
        return self._clock() - self._begin_s

    @property
    def phase_elapsed_s(self) -> float:
        """Time since the beginning of the phase."""
        return self._clock() - self._phase_s

    def is_new(self, text: str) -> bool:
        """Whether a line of progress begins another phase."""
        return _parsed(text)[0] != self.name

    def update(self, text: str, share: float | None) -> None:
        """Take a line of progress.

        Args:
            text: The line.
            share: The share that is done, if it is known and not in the line.
        """
        name, said = _parsed(text)
        if name != self.name:
            self.name, self._phase_s = name, self._clock()
        self._text, self.share = _SHARE.sub("", text), share if share is not None else said
        for prefix in self._limits_s:
            if name.startswith(prefix):
                self._limited_s.setdefault(prefix, self._clock())

    def ended(self) -> str:
        """The phase with its duration, now that it ends."""
        return f"[{self.elapsed_s:3.0f} s] {self.name}: {self.phase_elapsed_s:.1f} s"

    def going_on(self) -> str:
        """The phase with what is done of it."""
        return f"[{self.elapsed_s:3.0f} s] {self.name}{self._percent}"

    def line(self) -> str:
        """The line on a terminal: what is done, for how long, and what is left."""
        return f"{self._text or 'starting'}{self._percent}  {duration(self.elapsed_s)}{self._left}"

    @property
    def _percent(self) -> str:
        return "" if self.share is None else f" ({self.share:.0%})"

    @property
    def _left(self) -> str:
        for prefix, begin_s in self._limited_s.items():
            left_s = self._limits_s[prefix] - (self._clock() - begin_s)
            if self.name.startswith(prefix) and left_s > 0:
                return f", at most {duration(left_s)} left"
        taken_s = self.phase_elapsed_s
        if self.share is None or not 0 < self.share < 1 or taken_s < _SURE_S:
            return ""
        return f", about {duration(taken_s * (1 - self.share) / self.share)} left"


def _parsed(text: str) -> tuple[str, float | None]:
    """The phase that a line belongs to, and the share of it that is done."""
    said = _SHARE.search(text)
    share = None if said is None else int(said.group(1)) / 100
    name = _ROUND.sub("", _SHARE.sub("", text).partition(": ")[0])
    counted = _COUNT.match(name)
    if counted is None:
        return name, share
    return f"{counted['phase']}s", (int(counted["number"]) - 1) / int(counted["most"])


def duration(seconds: float) -> str:
    """A duration: 12.4 -> "12 s", 192 -> "3:12 min"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02} min"
