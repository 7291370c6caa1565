"""The page of a run while it trains: rewritten every few seconds, and loaded again by the browser."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ...autopilot.summary import AutoSummary
from ...ground.errors import PoochError
from .run import write_live_report

_EVERY_S = 2.0
_MOST_SHARE = 0.01  # of the time of training that writing may take


class LivePage:
    """Rewrites the page after a step, at most every few seconds.

    It is written in the thread that trains, between two steps, so nothing changes while it is read; and so seldom that
    it takes a hundredth of the time at most. A page that cannot be written is left alone from then on.

    Args:
        path: Returns the file to write.
        title: What is run.
        summary: What happened so far; None: nothing yet.
        command: What the page is written by.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        path: Callable[[], Path],
        title: str,
        summary: Callable[[], AutoSummary | None],
        *,
        command: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._title, self._summary, self._command = path, title, summary, command
        self._clock, self._next_s = clock, clock()
        self._process = os.getpid()

    def watch(self) -> None:
        """Look after each step of any optimizer from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: self.stepped())

    def stepped(self) -> None:
        """Write the page if it is time to."""
        began_s = self._clock()
        if began_s < self._next_s or os.getpid() != self._process:  # a worker that the script has forked
            return
        summary = self._summary()
        if summary is None or not summary.steps:
            return
        try:
            write_live_report(summary, self._path(), title=self._title, command=self._command)
        except PoochError:  # the page that is written in the end tells why
            self._next_s = float("inf")
            return
        ended_s = self._clock()
        self._next_s = ended_s + max(_EVERY_S, (ended_s - began_s) / _MOST_SHARE)
