"""What a step under a plan did, and what all steps of a run did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    """Times that a device takes by itself."""

    @property
    def step_ms(self) -> float:
        """Of the whole step."""

    @property
    def stall_ms(self) -> float:
        """Of the waits for copies."""


@dataclass
class RunStats:
    """Counts of one step (the last one that was begun).

    Attributes:
        host_step_ms: from the beginning of the region to the last read of a saved value, as the host sees it.
        host_stall_ms: time that the host waited for copies; 0 on a GPU, where streams wait and the host goes on.
        device_clock: of a device with streams, whose times are the ones that count there; None on a CPU.
        swapped_out_bytes, swapped_in_bytes: bytes moved.
        emptied_bytes: bytes that left in the forward pass while the program still held them.
        recomputed_ops: ops replayed.
        peak_bytes: highest live device bytes: on a GPU of this step, on a CPU of the last step that was measured (at
            intervals, and inside of `run.measured()`); None before.
        reserved_bytes: highest bytes that the caching allocator had taken from the GPU; None on a CPU.
        rounding_bytes: of a peak measured by `run.measured()`: what the allocator's rounding added to it.
        late_swaps: values that had to be brought back when they were read, outside of the schedule.
        mismatches: steps that left the profiled path (1 for this step, if it did).
        kept_after_errors: values that stayed on the device because their copy failed.
    """

    host_step_ms: float = 0.0
    host_stall_ms: float = 0.0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    emptied_bytes: int = 0
    recomputed_ops: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    rounding_bytes: int = 0
    late_swaps: int = 0
    mismatches: int = 0
    kept_after_errors: int = 0
    device_clock: Clock | None = field(default=None, repr=False, compare=False)

    @property
    def step_ms(self) -> float:
        """From the beginning of the region to the last read of a saved value. On a GPU from the device's own events, to
        the moment at which nothing of the step's graph is left, and 0 before; the host waits for that moment here.
        """
        return self.host_step_ms if self.device_clock is None else self.device_clock.step_ms

    @property
    def stall_ms(self) -> float:
        """Time that compute stood still for copies. On a GPU from the device's own events, for which the host waits
        here once the step is over; in mid-step the waits that are over count, and nobody waits.
        """
        return self.host_stall_ms if self.device_clock is None else self.device_clock.stall_ms


@dataclass
class RunTotals:
    """Counts over all steps of a run.

    Attributes:
        steps: that were begun. steps_off_path: that left the profiled path.
        steps_measured: whose peak is known. steps_over_budget: of these, those whose peak passed the budget
            by more than the allocator's rounding.
        peak_bytes: the highest of the measured peaks; None before the first.
    """

    steps: int = 0
    steps_off_path: int = 0
    steps_measured: int = 0
    steps_over_budget: int = 0
    peak_bytes: int | None = None
