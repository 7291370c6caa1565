"""The time account of a run: every part has a share; one that no longer fits is not begun. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not run"]
RESERVE_S = 5.0  # for writing the report


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run, done in a process of its own.

    Attributes:
        name: what `benchmarks.gpu.part` knows it by.
        least_s: it is not begun with less time left.
        most_s: it is ended after that.
        needs: modules that it imports beyond those that every part needs.
    """

    name: str
    least_s: float
    most_s: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a part. `why`: the reason where it failed or was not run; `data`: what it measured."""

    name: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Account:
    """Seconds that may be spent in all. `clock`: seconds that only grow."""

    total_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    @property
    def left_s(self) -> float:
        """What is left, the reserve kept back."""
        return self._start_s + self.total_s - RESERVE_S - self.clock()

    def grant_s(self, part: Part) -> float | None:
        """Seconds that the part may take, or None where too few are left."""
        left = self.left_s
        return min(part.most_s, left) if left >= part.least_s else None


def exit_code(results: list[Result]) -> int:
    """0: every part ran and passed. 1: a part failed. 3: none failed, but not every part was run."""
    statuses = {result.status for result in results}
    if "failed" in statuses:
        return 1
    return 0 if statuses == {"passed"} else 3
