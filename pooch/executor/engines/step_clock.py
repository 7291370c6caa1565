"""Times of a step as measured on the device, since the host runs far ahead of it."""

from __future__ import annotations

import torch

from ...torchtools import accelerators


class StepClock:
    """Events on the compute stream: at the beginning of a step, around each wait for a copy, and at the end.

    Nothing waits for them while the step is running. Reading a time afterwards blocks until the last event.

    Args:
        stream: The stream on which the step computes.
        device: The device of the stream.
    """

    def __init__(self, stream: torch.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._begin = self._now()
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        self._end: torch.Event | None = None

    def wait(self, event: torch.Event) -> None:
        """Make the stream wait for a copy, between two timing events."""
        before = self._now()
        self._stream.wait_event(event)
        self._waits.append((before, self._now()))

    def stop(self) -> None:
        """End the step, once all of its work has been issued."""
        if self._end is None:
            self._end = self._now()

    @property
    def step_ms(self) -> float:
        """Time from the beginning to the end on the device. 0 while the step is running."""
        if self._end is None:
            return 0.0
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))

    @property
    def stall_ms(self) -> float:
        """Time that compute waited for copies. While the step is running, only completed waits count."""
        if self._end is not None:
            self._end.synchronize()
        waits = list(self._waits)
        return float(sum(before.elapsed_time(after) for before, after in waits if self._end or after.query()))

    def _now(self) -> torch.Event:
        event = accelerators.new_event(self._device, timed=True)
        event.record(self._stream)
        return event
