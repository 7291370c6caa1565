"""What a check is told, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ...ground.progress import Progress

if TYPE_CHECKING:
    import torch

    from ...ir import Link

Status = Literal["passed", "told", "failed", "not run"]
Figure = str | int | float


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at, such as "random numbers". It names the fault where the check failed.
        status: "passed"; "told": worth knowing, but no fault; "failed"; or "not run".
        text: one line: what was found and, where something is wrong, what to do.
        figures: what was measured, by name with its unit.
    """

    check: str
    status: Status
    text: str
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass(slots=True)
class Patient:
    """The machine that is examined, and what earlier checks know of it.

    Attributes:
        device: where models are trained.
        progress: called with what is being done.
        deadline_s: when the examination has to end, by `time.monotonic`.
        link: the link between the device and its swap tier, once it was measured.
        failed: names of the findings that failed so far.
    """

    device: torch.device
    progress: Progress
    deadline_s: float
    link: Link | None = None
    failed: set[str] = field(default_factory=set)

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self.deadline_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: what it looks at.
        run: gives its findings.
        least_s: the time that it needs; with less, it is not begun.
        needs: findings that must not have failed: what it would find is known.
    """

    name: str
    run: Callable[[Patient], Iterator[Finding]]
    least_s: float = 5.0
    needs: tuple[str, ...] = ()
