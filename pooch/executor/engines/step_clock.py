"""Times of one step as the device itself tells them: the host is far ahead of it, and its own clock says nothing."""

from __future__ import annotations

import torch

from pooch.torchtools import accelerators


class StepClock:
    """Events on the stream that computes: at the beginning of a step, around each wait for a copy, and at the end.

    Nothing waits for them while the step goes on; whoever asks for a time once it is over waits for its last event.

    Args:
        stream: on which the step computes. device: of the stream.
    """

    def __init__(self, stream: torch.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._begin = self._now()
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        self._end: torch.Event | None = None

    def wait(self, event: torch.Event) -> None:
        """Let the stream wait for a copy, between two events of ours."""
        before = self._now()
        self._stream.wait_event(event)
        self._waits.append((before, self._now()))

    def stop(self) -> None:
        """The step is over: all that it computes has been issued."""
        if self._end is None:
            self._end = self._now()

    @property
    def step_ms(self) -> float:
        """From the beginning to the end, on the device; 0 while the step goes on."""
        if self._end is None:
            return 0.0
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))

    @property
    def stall_ms(self) -> float:
        """Time that compute stood still for copies; while the step goes on, in the waits that are over."""
        if self._end is not None:
            self._end.synchronize()
        waits = list(self._waits)
        return float(sum(before.elapsed_time(after) for before, after in waits if self._end or after.query()))

    def _now(self) -> torch.Event:
        event = accelerators.new_event(self._device, timed=True)
        event.record(self._stream)
        return event
