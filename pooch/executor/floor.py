"""The budget beneath a plan that is applied: the plan is advice, and this holds when it is not enough."""

from __future__ import annotations

import torch

from ..machine.account import NobodyAsks
from ..torchtools.cpu_allocator import CountingAllocator, counting_allocator
from ..torchtools.threads import is_alone
from .engines.protocol import CopyEngine
from .online import Evictor
from .online.live_bytes import CountedBytes
from .statistics import RunStats, WarnOnce
from .verification import Verification


class _Uncounted(NobodyAsks):
    """Counts nothing: the plan itself bounds the bytes of steps that follow it."""

    asks = True  # so nobody makes room beforehand

    def look(self) -> tuple[int, int] | None:
        """Return None."""
        return None

    def now(self) -> int:
        """Return 0."""
        return 0

    recent = peak = now

    def reset_peak(self) -> None:
        """Do nothing."""


class Floor(Evictor):
    """Holds the budget of a plan beneath its steps, whatever they do.

    Before live bytes would pass the budget, activations that the plan keeps leave too: they are copied out, or dropped
    to be computed again. The allocator of the device has to ask for room, which that of the CPU does.

    Args:
        budget_bytes: The budget of the plan.
        persistent_bytes: What is live before a step, according to the plan.
        engine: Copies to and from the tier. Whoever opened it closes it.
        device: The device, a CPU.
        verification: What is known of the recipes.
        warn_once: Tells the user.
    """

    def __init__(
        self,
        budget_bytes: int,
        persistent_bytes: int,
        engine: CopyEngine,
        device: torch.device,
        verification: Verification,
        warn_once: WarnOnce,
    ) -> None:
        super().__init__(budget_bytes, engine, _Uncounted(), device, verification=verification)
        self._persistent_bytes = persistent_bytes
        self.warn_once = warn_once
        self.is_held = False

    def begin_step(self, stats: RunStats) -> None:
        """Begin to count for a new step, from the calling thread."""
        self.live.raise_failure()
        if not self.is_held and (counted := self._counted()) is not None:
            self.live, self.is_held = counted, True
            self.set_budget(self.budget_bytes)
            self.ask_again()
        super().begin_step(stats)
        self._start_bytes = self._persistent_bytes

    def _counted(self) -> CountedBytes | None:
        """Begin to count bytes, or return None where that cannot be done.

        The allocator holds one budget: that of `pooch.auto`, or of the first plan that was applied. Counting looks at
        all tensors once, and PyTorch ends the process if another thread is just releasing one of them: beside other
        threads, such as those of a notebook, what is live is what the plan says.
        """
        allocator = counting_allocator()
        if not isinstance(allocator, CountingAllocator) or allocator.has_limit:
            return None
        live_now_bytes = None if is_alone() else self._persistent_bytes
        counted = CountedBytes(allocator, reads_peak=False, live_now_bytes=live_now_bytes)
        return counted if counted.is_in_place else None

    def stop(self) -> None:
        """Hold nothing any longer. Steps that are alive can still read what they saved."""
        live, self.live, self.is_held = self.live, _Uncounted(), False
        live.close()
