"""The budget beneath a plan that is applied: the plan is advice, and this holds when it is not enough."""

from __future__ import annotations

import torch

from ..machine.account import LiveBytes
from ..torchtools import accelerators
from ..torchtools.cpu_allocator import CountingAllocator, counting_allocator
from ..torchtools.threads import is_alone
from .engines.protocol import CopyEngine
from .evictor import Evictor
from .live_bytes import CountedBytes, DeviceBytes
from .statistics import RunStats, WarnOnce
from .verification import Verification

# Times the largest activation: what may come between two looks at the bytes of a device. A backward op takes back what
# it reads, and makes up to three temporary tensors of that size, as that of `cos` does; then come gradients.
_ROOM_FOR_AN_OP = 5


class _Uncounted(LiveBytes):
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

    On a CPU, whose allocations ask for room, it is held from the first step on: before live bytes would pass it, what
    the plan holds leaves too, copied out or dropped to be computed again. On a device with streams no allocation asks.
    There the plan itself bounds the bytes of a step that follows it, and bytes are counted before each op from where a
    step leaves its path.

    Args:
        budget_bytes: The budget of the plan, or 0 if it has none, which is never held.
        persistent_bytes: What is live before a step, according to the plan.
        largest_bytes: Size of the largest activation of the plan.
        engine: Copies to and from the tier. Whoever opened it closes it.
        device: The device.
        verification: What is known of the recipes.
        warn_once: Tells the user.
    """

    def __init__(
        self,
        budget_bytes: int,
        persistent_bytes: int,
        largest_bytes: int,
        engine: CopyEngine,
        device: torch.device,
        verification: Verification,
        warn_once: WarnOnce,
    ) -> None:
        super().__init__(budget_bytes, engine, _Uncounted(), device, verification=verification)
        self._persistent_bytes, self._least_room_bytes = persistent_bytes, _ROOM_FOR_AN_OP * largest_bytes
        self._has_streams = accelerators.has_streams(device)
        self.warn_once = warn_once
        self.is_held = False

    def begin_step(self, stats: RunStats) -> None:
        """Begin to count for a new step, from the calling thread."""
        self.live.raise_failure()
        if self._has_streams:
            self.live, self.is_held = _Uncounted(), False
        elif not self.is_held and (counted := self._counted()) is not None:
            self.live, self.is_held = counted, True
            self.set_budget(self.budget_bytes)
            self.ask_again()
        super().begin_step(stats)
        self._start_bytes = self._persistent_bytes

    def plan_left(self) -> None:
        """Note that the plan of the step that is running has fallen silent."""
        if self._has_streams and self.budget_bytes and not self.is_held:
            self.live, self.is_held = DeviceBytes(self.device), True
            self.live.look()  # how high it was before says nothing about the ops to come
            self._most_higher_bytes = max(self._most_higher_bytes, self._least_room_bytes)

    def device_peak_bytes(self) -> int:
        """Return the peak since the last step began, on a device with streams."""
        counted_bytes = self.live.peak() if self._has_streams else 0
        return max(counted_bytes, accelerators.peak_allocated_bytes(self.device))

    def _counted(self) -> CountedBytes | None:
        """Begin to count bytes, or return None where that cannot be done.

        The allocator holds one budget: that of `pooch.auto`, or of the first plan that was applied. Counting looks at
        all tensors once, and PyTorch ends the process if another thread is just releasing one of them: beside threads
        that may be training, what is live is what the plan says.
        """
        allocator = counting_allocator() if self.budget_bytes and self.device.type == "cpu" else None
        if not isinstance(allocator, CountingAllocator) or allocator.has_limit:
            return None
        live_now_bytes = None if is_alone() else self._persistent_bytes
        counted = CountedBytes(allocator, reads_peak=False, live_now_bytes=live_now_bytes)
        return counted if counted.is_in_place else None

    def stop(self) -> None:
        """Hold nothing any longer. Steps that are alive can still read what they saved."""
        self.stand_ins.end()
        live, self.live, self.is_held = self.live, _Uncounted(), False
        live.close()
