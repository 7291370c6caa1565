"""Checks whether the steps of a run stay within the budget of its plan, and reports a likely cause if one does not.

A GPU's allocator keeps counters, so every step is measured. On a CPU a measurement takes a walk through all Python
objects and a session of torch's profiler, so only the first steps are measured, then ever fewer, and any step in which
something is noticed that the plan does not account for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ..ground.weakly import weakly
from ..ir import Plan
from ..torchtools import accelerators
from ..torchtools.checksums import CHECKSUM_BYTES
from ..torchtools.memory_trace import live_bytes
from ..torchtools.peak_window import PeakWindow
from ..torchtools.requested_sizes import rounding_bytes
from ..torchtools.tensors import storage_bytes
from .causes import (
    CHECKSUMS,
    GRADIENTS,
    OFF_PATH,
    ORDER,
    RETAINED,
    ROUNDING,
    SECOND_ORDER,
    UNKNOWN,
    Cause,
    Overrun,
    ParameterWatch,
    forwards,
    gradients,
    tier,
    unknown_bytes,
    unmeasured_text,
)
from .engines.health import TierHealth
from .kept_step import KeptStep
from .statistics import RunStats, RunTotals, WarnOnce
from .step import Step

MEASURE_EVERY = 1000
FIRST_MEASURED = (1, 2, 10, 100)  # by step 2 there are gradients and optimizer state, by step 10 caches
MOST_FORWARDS = 16  # before one backward pass, in one measurement, since the profiler's events take memory too


@dataclass(eq=False)
class _Followed:
    """A step whose backward pass has not ended. The step lives as long as its graph."""

    step: weakref.ref[Step | KeptStep]
    number: int
    stats: RunStats
    is_forward_over: bool = False
    is_read: bool = False
    is_over_budget: bool = False


@dataclass(eq=False)
class _Measurement:
    """A measurement in progress. `window` is None if the GPU's allocator or `run.measured()` measures."""

    number: int
    stats: RunStats
    start_bytes: int
    window: PeakWindow | None = None
    followed: list[_Followed] = field(default_factory=list)
    causes: dict[str, Cause] = field(default_factory=dict)
    backward_passes: int = 0
    is_counted: bool = False
    is_over_budget: bool = False

    @property
    def is_over(self) -> bool:
        """Whether a backward pass ran, and no graph is left for another one."""
        return self.backward_passes > 0 and all(f.step() is None for f in self.followed)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass still lacks its backward pass."""
        return any(f.step() is not None and not f.is_read for f in self.followed)


class RunWatch:
    """Measures the steps of one run.

    Args:
        plan: The plan of the run.
        model: The model, of which only weak references are held.
        device: The model's device.
        warn_once: Gives the warnings.
        measure_every: On a CPU, measure every step whose number is a multiple of this, besides the first ones. 0
            measures none.
        on_overrun: Called with each measured peak over the budget; returns whether it was handled. Otherwise, and with
            None, a warning is given.
        compares: Whether replays are compared with what they replace, which takes a few bytes of a GPU.
        health: What is wrong with the swap tier, or None.
        device_peak_bytes: Returns the peak of the step so far, on a device whose allocator counts.
        missing_bytes: Returns by how much the step that runs had to pass the budget, as far as that is counted.

    Attributes:
        totals: Counters over all steps.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        device: torch.device,
        warn_once: WarnOnce,
        measure_every: int,
        on_overrun: Callable[[Overrun], bool] | None = None,
        compares: bool = True,
        health: TierHealth | None = None,
        device_peak_bytes: Callable[[], int] | None = None,
        missing_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.totals = RunTotals()
        self._plan, self._device, self._warn_once = plan, device, warn_once
        self._measure_every, self._on_overrun, self._health = measure_every, on_overrun, health
        self._checksum_bytes = CHECKSUM_BYTES if compares and accelerators.has_streams(device) else 0
        self._device_peak_bytes = device_peak_bytes or partial(accelerators.peak_allocated_bytes, device)
        self._missing_bytes = missing_bytes
        self._parameters = ParameterWatch(model)
        self._followed: list[_Followed] = []
        self._measurement: _Measurement | None = None
        self._is_due = False  # a step should have been measured, but could not be
        self._noticed: set[str] = set()
        self._to_confirm: dict[str, str] = {}  # {kind: text} noticed in a step that was not measured
        self._is_measured_outside = False

    @property
    def _waiting(self) -> int:
        """Forward passes whose backward pass has not begun."""
        return sum(not each.is_read for each in self._followed)

    @property
    def is_measuring(self) -> bool:
        """Whether the step that was just begun is measured, other than by `run.measured()`."""
        return self._measurement is not None and not self._is_measured_outside

    # From the beginning of a region to the end of its backward pass -----------------------------------------------

    def begin(self, stats: RunStats) -> None:
        """Begin the region of a step."""
        self.totals.steps += 1
        self._followed = [each for each in self._followed if each.step() is not None]
        earlier = self._measurement
        self._end_what_is_over()
        if earlier is not None:
            stats.peak_bytes = earlier.stats.peak_bytes
        if self._is_measured_outside:
            self._measurement = self._measurement or _Measurement(self.totals.steps, stats, live_bytes(self._device))
            self._measurement.stats = stats
        if self._plan.budget_bytes:
            causes = tuple(self._causes_at_the_beginning())
            if self._measurement is None and self._is_to_measure(causes):
                self._open(stats)
                causes = tuple(self._causes_at_the_beginning())  # all of them are of use now
            for cause in causes:
                self._notice(cause)

    @contextmanager
    def following(self, step: Step | KeptStep) -> Iterator[None]:
        """Follow a planned region, and then its graph."""
        followed = _Followed(weakref.ref(step, weakly(self._graph_is_gone)), self.totals.steps, step.stats)
        self._followed.append(followed)
        if self._measurement is not None:
            self._measurement.followed.append(followed)
        if self._plan.budget_bytes:
            step.on_read = partial(self._first_read, followed)
        try:
            yield
        except BaseException:
            self._discard()
            raise
        finally:
            followed.is_forward_over = True
            if step.stats.mismatches:
                self.totals.steps_off_path += 1
                if self._measurement is not None:
                    self._measurement.causes[OFF_PATH.kind] = OFF_PATH
            if self._plan.budget_bytes and (cause := self._tier_cause(step.stats)) is not None:
                self._notice(cause)

    def close(self) -> None:
        """End a measurement in progress."""
        measurement = self._measurement
        if measurement is not None and measurement.window is not None:
            self._end(measurement)

    def stop(self) -> None:
        """End a measurement in progress, and look at the model no longer."""
        self.close()
        self._parameters.changes.stop()

    @contextmanager
    def measured_outside(self) -> Iterator[Callable[[int], None]]:
        """Let the caller measure what runs inside. Yields a function that takes the peak."""
        self.close()
        self._is_measured_outside = True
        peaks: list[int] = []
        try:
            yield peaks.append
        finally:
            measurement, self._measurement, self._is_measured_outside = self._measurement, None, False
            if measurement is not None and peaks:
                self._judge(measurement, peaks[0])

    # What is noticed --------------------------------------------------------------------------------------------------

    def _causes_at_the_beginning(self) -> Iterator[Cause]:
        yield from self._parameters.causes()
        in_flight = self._plan.microbatches_in_flight
        expects_gradients = self._plan.accumulates or in_flight > 1  # of earlier microbatches
        is_of_use = GRADIENTS not in self._noticed or self._measurement is not None or self._looks_anyway
        living = [] if expects_gradients or not is_of_use else self._parameters.gradients()
        if living:
            yield gradients(storage_bytes(living))
        if self._waiting >= in_flight:
            yield forwards(self._waiting + 1, in_flight)

    def _notice(self, cause: Cause) -> None:
        """Attribute a cause to the current measurement. If there is none, the next step is measured."""
        if self._measurement is not None:
            self._measurement.causes[cause.kind] = cause
        if cause.kind in self._noticed:
            return
        self._noticed.add(cause.kind)
        if self._measurement is None:
            self._to_confirm[cause.kind] = unmeasured_text(self.totals.steps, cause, self._plan)
            if self._measure_every <= 0 and not accelerators.has_streams(self._device):
                self._tell_unconfirmed({})

    def _first_read(self, followed: _Followed) -> None:
        """Handle the first read of a saved tensor of a step, normally in a backward pass."""
        step = followed.step()
        if torch._C._current_graph_task_id() == -1:  # the program inspects a node's saved tensors
            if step is not None:
                step.on_read = partial(self._first_read, followed)
            return
        builds_graph = torch.is_grad_enabled()
        if builds_graph:
            self._notice(SECOND_ORDER)
        if followed.is_forward_over:
            followed.is_read = True
            self._mark(followed)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._backward_ended, followed, builds_graph))

    def _backward_ended(self, followed: _Followed, builds_graph: bool) -> None:
        """Handle the end of a backward pass through a step, before the autograd engine returns."""
        step = followed.step()
        if step is not None:
            step.on_read = partial(self._first_read, followed)
            if followed.is_forward_over and not builds_graph:  # otherwise the backward pass's own graph keeps it alive
                self._notice(RETAINED)
        measurement = self._measurement
        if measurement is None or followed not in measurement.followed:
            self._judge_unmeasured(followed)
            return
        if not followed.is_forward_over:
            return
        measurement.backward_passes += 1
        self._mark(followed)
        if measurement.window is None and not self._is_measured_outside:
            if measurement.is_over:
                self._measurement = None
            self._judge(measurement, self._device_peak_bytes())

    def _mark(self, followed: _Followed) -> None:
        measurement = self._measurement
        if measurement is not None and measurement.window is not None and followed in measurement.followed:
            measurement.window.mark()

    # Measuring --------------------------------------------------------------------------------------------------------

    @property
    def _looks_anyway(self) -> bool:
        """Whether the step that begins is to be measured, whatever is noticed at its beginning."""
        if accelerators.has_streams(self._device) and self._plan.schedule.actions:
            return True
        number, every = self.totals.steps, self._measure_every
        is_planned = every > 0 and (number in FIRST_MEASURED or number % every == 0)
        return every > 0 and (is_planned or self._is_due or bool(self._to_confirm))

    def _is_to_measure(self, causes: tuple[Cause, ...]) -> bool:
        """Whether to measure the step that begins."""
        if accelerators.has_streams(self._device) and self._plan.schedule.actions:
            return True
        if self._measure_every <= 0:
            return False
        number = self.totals.steps
        planned = number in FIRST_MEASURED or number % self._measure_every == 0
        self._is_due = self._is_due or planned or any(cause.kind not in self._noticed for cause in causes)
        if 0 < self._waiting < self._plan.microbatches_in_flight:
            return False  # a window would take what earlier microbatches free for alive: the next first one is measured
        return self._is_due or bool(self._to_confirm)

    def _open(self, stats: RunStats) -> None:
        if accelerators.has_streams(self._device):
            self._measurement = _Measurement(self.totals.steps, stats, live_bytes(self._device))
            return
        window = PeakWindow(self._backward_returned, interrupted=self._discard)
        if self._guarded(window.open):
            self._measurement = _Measurement(self.totals.steps, stats, window.start_bytes, window)

    def _guarded(self, measure: Callable[[], bool | int | None]) -> bool | int | None:
        """Call a function that measures. If it fails, training goes on without measurements."""
        try:
            return measure()
        except Exception as error:  # noqa: BLE001  (whatever the profiler raises)
            self._measure_every, self._measurement = 0, None
            self._warn_once("measuring", f"peaks cannot be measured here and will not be measured from now on: {error}")
            return None

    def _end_what_is_over(self) -> None:
        """End the measurement of earlier steps, unless their backward pass is still to come."""
        measurement = self._measurement
        if measurement is None or self._is_measured_outside:
            return
        if measurement.window is None:
            self._measurement = None
        elif not measurement.awaits_backward or len(measurement.followed) >= MOST_FORWARDS:
            self._end(measurement)

    def _backward_returned(self, failed: bool) -> None:
        measurement = self._measurement
        if measurement is None:
            return
        if failed:
            self._discard()
        elif measurement.is_over:
            self._end(measurement)

    def _graph_is_gone(self, _: object) -> None:
        measurement = self._measurement
        if measurement is None or measurement.window is None or measurement.window.is_in_backward:
            return
        gone = [each.is_forward_over and each.step() is None for each in measurement.followed]
        if gone and all(gone):
            self._end(measurement)

    def _end(self, measurement: _Measurement) -> None:
        """Close the window. Without a backward pass in it, its peak is meaningless."""
        window = measurement.window
        assert window is not None
        if not window.is_mine:
            return
        self._measurement = None
        peak_bytes = self._guarded(window.close)
        if measurement.backward_passes and peak_bytes is not None:
            measurement.stats.peak_bytes = peak_bytes
            self._judge(measurement, peak_bytes)

    def _discard(self) -> None:
        """Abandon the measurement, since the step failed or the user starts a profiler. A later step is measured."""
        measurement = self._measurement
        if measurement is not None and measurement.window is not None and measurement.window.is_mine:
            self._measurement = None
            self._guarded(measurement.window.close)

    # Judging ----------------------------------------------------------------------------------------------------------

    def _judge(self, measurement: _Measurement, peak_bytes: int) -> None:
        self._is_due = False
        totals, budget_bytes = self.totals, self._plan.budget_bytes
        if not measurement.is_counted:
            measurement.is_counted = True
            totals.steps_measured += 1
        totals.peak_bytes = max(peak_bytes, totals.peak_bytes or 0)
        rounded_bytes = budget_bytes + rounding_bytes(self._device)
        if 0 < budget_bytes < peak_bytes <= rounded_bytes + self._checksum_bytes:
            cause = ROUNDING if peak_bytes <= rounded_bytes else CHECKSUMS
            self._tell(Overrun(measurement.number, peak_bytes, budget_bytes, is_off_path=False, cause=cause))
        elif 0 < budget_bytes < peak_bytes:
            totals.steps_over_budget += not measurement.is_over_budget
            measurement.is_over_budget = True
            is_off_path = OFF_PATH.kind in measurement.causes
            cause = self._likely_cause(measurement, peak_bytes - budget_bytes)
            self._tell(Overrun(measurement.number, peak_bytes, budget_bytes, is_off_path, cause))
        self._tell_unconfirmed(measurement.causes)

    def _judge_unmeasured(self, followed: _Followed) -> None:
        """Tell of a step that has left its path and passed the budget, which is counted in each of them."""
        missing_bytes, budget_bytes = self._missing_bytes(), self._plan.budget_bytes
        if missing_bytes and budget_bytes and followed.stats.mismatches and not followed.is_over_budget:
            followed.is_over_budget = True
            totals, peak_bytes = self.totals, budget_bytes + missing_bytes
            totals.steps_over_budget += 1
            totals.peak_bytes = max(peak_bytes, totals.peak_bytes or 0)
            self._tell(Overrun(followed.number, peak_bytes, budget_bytes, is_off_path=True, cause=OFF_PATH))

    def _tier_cause(self, stats: RunStats) -> Cause | None:
        fault = None if self._health is None else self._health.fault
        return tier(stats.kept_bytes, fault) if fault is not None and stats.kept_bytes else None

    def _likely_cause(self, measurement: _Measurement, excess_bytes: int) -> Cause:
        causes = dict(measurement.causes)
        if (cause := self._tier_cause(measurement.stats)) is not None:
            causes[cause.kind] = cause
        more_bytes = measurement.start_bytes - self._plan.persistent_bytes
        if self._plan.persistent_bytes and more_bytes >= excess_bytes:  # fewer would not explain it
            causes["bytes"] = unknown_bytes(more_bytes)
        return min(causes.values(), key=lambda cause: ORDER.index(cause.kind), default=UNKNOWN)

    def _tell(self, overrun: Overrun) -> None:
        is_taken_care_of = self._on_overrun is not None and self._on_overrun(overrun)
        if not is_taken_care_of:
            self._warn_once(("budget", overrun.cause.kind), overrun.text)

    def _tell_unconfirmed(self, seen: dict[str, Cause]) -> None:
        """Report what was noticed in a step that was not measured, and did not recur in the one that was."""
        unconfirmed, self._to_confirm = self._to_confirm, {}
        for kind, text in unconfirmed.items():
            if kind not in seen:
                self._warn_once(("budget", kind), text)
