"""Garbage in the way: reference cycles that Python has not collected hold tensors, and take a part of the budget."""

from __future__ import annotations

import gc

from ..machine.account import LiveBytes
from ..torchtools.memory_trace import CollectorOff
from .seldom import Help

_LONGER = 4  # times: with large libraries loaded, a collection takes as long as some steps


class Garbage:
    """Collects garbage where the budget would be passed.

    While that frees little and does not help to hold the budget, it is tried after four times as many steps each time.
    A program that has switched Python's own collecting off has its reasons, and is left alone.

    Args:
        live: Counts the bytes that are live.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._next_step, self._wait_steps = 0, 1
        self._help = Help()

    def collect(self, step: int) -> int:
        """Collect garbage, unless it is too early for that, and return how many bytes that has freed.

        Args:
            step: The number of steps so far.
        """
        if step < self._next_step or CollectorOff.by_program():
            return 0
        before_bytes = self._live.now()
        gc.collect()
        freed_bytes = max(0, before_bytes - self._live.now())
        if freed_bytes:
            self._help.found(freed_bytes, before_bytes)
        self._wait_steps *= _LONGER
        self._next_step = step + self._wait_steps
        return freed_bytes

    def step_ends(self, *, is_held: bool) -> None:
        """Note whether the budget was held in the step: with the help of what was freed, if anything was."""
        if self._help.step_ends(is_held=is_held):
            self._next_step, self._wait_steps = 0, 1
