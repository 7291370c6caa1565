"""Counters of a step and of a run, and warnings that are given once per run."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..ground.bounded import Topics
from ..ground.units import format_bytes, format_ms, plural
from ..ground.visible import visible
from ..torchtools.cpu_allocator.arena_stats import ArenaStats
from .engines.step_clock import StepClock


@dataclass(slots=True)
class RunStats:
    """Counters of one step: the last one that was begun.

    Attributes:
        host_step_ms: Time from the beginning of the region to the last read of a saved value, as seen by the host.
        host_stall_ms: Time that the host waited for copies. 0 on a GPU, where streams wait instead.
        swapped_out_bytes: Bytes copied to the tier.
        swapped_in_bytes: Bytes copied back from the tier.
        spared_bytes: Bytes of both that no copy had to move, since masks and constants are packed.
        emptied_bytes: Bytes that left the device in the forward pass while the program still held them.
        recomputed_ops: Number of ops replayed.
        verified_bytes: Bytes of recomputed values that were also copied to the tier, to be compared with their replays.
        peak_bytes: Highest live device bytes. On a GPU of this step, on a CPU of the last step that was measured (at
            intervals, and inside of `run.measured()`). None before the first measurement.
        reserved_bytes: Highest bytes that the caching allocator reserved on the GPU. None on a CPU.
        rounding_bytes: What the allocator's rounding added to a peak measured by `run.measured()`.
        late_swaps: Number of values that were brought back at a read, outside of the schedule.
        mismatches: 1 if the step left the profiled path, else 0.
        has_other_sizes: Whether it left that since results of the same op had other sizes.
        kept_after_errors: Number of values that stayed on the device because their copy failed.
        ran_out_bytes: The most that an op of the forward pass asked for when memory ran out, and that was there once
            all that could had left, so that the op ran again. 0: memory never ran out. 1: the error did not say.
        kept_bytes: Bytes that a plan swaps and that stayed, because their copy failed or there was no room.
        ungoverned: Number of saved tensors and of calls that were left alone, since they cannot be watched: tensors
            without ordinary memory, `torch.func`, compiled functions.
        device_clock: The step's times as measured by a device with streams. None on a CPU.
    """

    host_step_ms: float = 0.0
    host_stall_ms: float = 0.0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    spared_bytes: int = 0
    emptied_bytes: int = 0
    recomputed_ops: int = 0
    verified_bytes: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    rounding_bytes: int = 0
    late_swaps: int = 0
    mismatches: int = 0
    has_other_sizes: bool = False
    kept_after_errors: int = 0
    ran_out_bytes: int = 0
    kept_bytes: int = 0
    ungoverned: int = 0
    device_clock: StepClock | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """What is not 0, on a device with streams without the times that reading would wait for."""
        sizes = {"peak": self.peak_bytes, "out": self.swapped_out_bytes, "in": self.swapped_in_bytes}
        parts = [f"{format_bytes(size)} {what}" for what, size in sizes.items() if size]
        counts = {"recomputed": self.recomputed_ops, "late": self.late_swaps, "kept": self.kept_after_errors}
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        parts += ["left the path"] if self.mismatches else []
        return f"RunStats({', '.join([format_ms(self.host_step_ms), *parts])})"

    @property
    def step_ms(self) -> float:
        """Time from the beginning of the region to the last read of a saved value.

        On a GPU it is measured by events on the device, up to the point at which the step's graph is freed. Reading it
        blocks the host until then; it is 0 while the step is running.
        """
        return self.host_step_ms if self.device_clock is None else self.device_clock.step_ms

    @property
    def stall_ms(self) -> float:
        """Time that compute waited for copies.

        On a GPU it is measured by events on the device. Reading it blocks the host once the step is over; during the
        step it counts completed waits and does not block.
        """
        return self.host_stall_ms if self.device_clock is None else self.device_clock.stall_ms


@dataclass
class RunTotals:
    """Counters over all steps of a run.

    Attributes:
        steps: Number of steps that were begun.
        steps_off_path: Number of steps that left the profiled path.
        steps_measured: Number of steps whose peak was measured.
        steps_over_budget: Number of measured steps over the budget by more than the allocator's rounding.
        peak_bytes: The highest measured peak, or None before the first.
        arena: What is known about the arena that serves the steps. None without one.
    """

    steps: int = 0
    steps_off_path: int = 0
    steps_measured: int = 0
    steps_over_budget: int = 0
    peak_bytes: int | None = None
    arena: ArenaStats | None = None

    def __repr__(self) -> str:
        counts = {
            "off path": self.steps_off_path,
            "measured": self.steps_measured,
            "over budget": self.steps_over_budget,
        }
        parts = [f"{count} {what}" for what, count in counts.items() if count]
        parts += [f"{format_bytes(self.peak_bytes)} peak"] if self.peak_bytes is not None else []
        parts += ["on an arena"] if self.arena is not None else []
        return f"RunTotals({', '.join([plural(self.steps, 'step'), *parts])})"


class WarnOnce:
    """Warns about a topic the first time it comes up. Later occurrences are only counted."""

    def __init__(self) -> None:
        self._told = Topics()

    def __call__(self, topic: Hashable, text: str) -> None:
        """Warn, unless this topic was reported before."""
        if self._told.is_new(topic):
            warnings.warn(visible(text), stacklevel=3)
