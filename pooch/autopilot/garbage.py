"""Garbage in the way: reference cycles that Python has not collected hold tensors, and take a part of the budget."""

from __future__ import annotations

import gc

from ..machine.account import LiveBytes
from ..torchtools.memory_trace import CollectorOff


class Garbage:
    """Collects garbage where the budget would be passed.

    While that frees nothing, it is tried after twice as many steps each time. A program that has switched Python's own
    collecting off has its reasons, and is left alone.

    Args:
        live: Counts the bytes that are live.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._next_step, self._wait_steps = 0, 1

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
        self._wait_steps = 1 if freed_bytes else 2 * self._wait_steps
        self._next_step = step + self._wait_steps
        return freed_bytes
