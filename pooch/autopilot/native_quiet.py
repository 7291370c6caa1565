"""Quiet steps that begin and end natively, one after the other, as long as each of them is known again.

Python runs one of them, tells the native part what it was known by (`teach`), and has it go on (`go_on`). From then on
no code of Pooch's in Python runs in such a step. Whatever else there is to be done takes over first: from there on
Python does everything, and if a step is running, it goes on as if Python had begun it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..executor.evictor import Evictor
from ..executor.live_bytes import CountedBytes
from ..machine.account import LiveBytes
from ..torchtools.module_changes import ModuleChanges
from ..torchtools.watch import LIBRARY
from .backward import RUNNING, BackwardWatch
from .budget import HeldBudget
from .library import Library
from .quiet import FAR_SHARE, QuietCalls, QuietKind
from .running import RunningStep


@dataclass(frozen=True, slots=True)
class QuietCounts:
    """What ran natively since the last time that somebody asked.

    Attributes:
        steps: Number of steps.
        steps_ms: Their time.
        peak_bytes: The highest of their peaks.
        last_peak_bytes: The peak of the last one.
        between_peak_bytes: The highest peak before one of them, since the step before.
        of_kinds: The numbers of steps of each kind.
    """

    steps: int
    steps_ms: float
    peak_bytes: int
    last_peak_bytes: int
    between_peak_bytes: int
    of_kinds: tuple[tuple[QuietKind, int], ...]


class NativeQuiet:
    """The native part, if there is one: on a CPU, where a native library can be built.

    Args:
        call: What surrounds calls of quiet steps in Python. Its state is kept natively as well.
        live: Counts live bytes.
        budget: The budget.
        library: Knows whether answers have come that have to be taken.
        changes: Notices that modules were given something.
        of_tier: What is to be told of the tier between steps.
        evictor: Knows whether room was missing.

    Attributes:
        steps: Of the native library, or None.
    """

    def __init__(
        self,
        call: object,
        live: LiveBytes,
        budget: HeldBudget,
        library: Library,
        changes: ModuleChanges,
        of_tier: list[str],
        evictor: Evictor,
    ) -> None:
        self._running: RunningStep | None = None
        self.steps: Any = None
        module = LIBRARY.get() if isinstance(live, CountedBytes) and not budget.is_followed else None
        if module is not None:
            assert isinstance(live, CountedBytes)
            looked = (
                call, live, budget, library.requests, changes.given, of_tier, evictor, RUNNING, BackwardWatch,
                torch.compiler, torch._C._dynamo.eval_frame.get_eval_frame_callback,
            )  # fmt: skip
            self.steps = module.QuietSteps(looked, *live.addresses, FAR_SHARE)

    def teach(self, quiet: QuietCalls, args: Any, kwargs: Any, kind: QuietKind) -> None:
        """Have the next step that a call like this one begins be known."""
        if self.steps is not None:
            quiet.teach(self.steps, args, kwargs, kind)

    def go_on(self, running: RunningStep, backward: BackwardWatch) -> None:
        """Have the next steps of the calling thread run natively, as far as they are known.

        Args:
            running: What runs them in Python.
            backward: Tells of backward passes, and nobody else may.
        """
        listeners = None if self.steps is None else BackwardWatch.only(backward)
        if listeners is not None:
            self._running = running
            self.steps.go_on(listeners)

    def take_over(self) -> RunningStep | None:
        """Have Python do everything from here on, and return the step that is running, if one is."""
        taken = None if self.steps is None else self.steps.take()
        if taken is None or taken is True or self._running is None:
            return None
        self._running.take_over(*taken)
        return self._running

    def count(self) -> QuietCounts | None:
        """Return what has run since the last time, or None if nothing has."""
        found = None if self.steps is None else self.steps.count()
        return None if found is None else QuietCounts(*found)

    def forget(self) -> None:
        """Know no call any more. What has run is to be counted before."""
        if self.steps is not None:
            self.steps.forget()
