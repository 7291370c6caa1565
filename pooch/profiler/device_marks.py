"""Op times of a step that is recorded while it trains on a device with streams, by events between its ops.

The ordinary session runs the step once more under torch's profiler for the times of kernels. A recorded training step
runs only once, so events tell what the device did: around each forward op, and in the backward pass around each read of
a saved value, since nothing else of it can be seen while it runs. Where the device waits for the host, the host's time
is in them, as it is in plain training.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..torchtools import accelerators
from .slots import StepAssembly

Mark = torch.Event


class DeviceMarks:
    """Timed events on the streams that compute a step. Nothing waits for them while it runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._around: dict[int, tuple[Mark, Mark]] = {}
        self._reads: list[tuple[Mark, Mark]] = []
        self._backward: list[Mark] = []

    def now(self) -> Mark:
        """Return an event on the calling thread's stream."""
        mark = accelerators.new_event(self._device, timed=True)
        mark.record(accelerators.current_stream(self._device))
        return mark

    def ran(self, call: int, begin: Mark) -> None:
        """Note the end of a forward op.

        Args:
            call: Number of its marker in the memory trace.
            begin: An event from before it.
        """
        self._around[call] = begin, self.now()

    def read(self, begin: Mark) -> None:
        """Note the end of a read of a saved value, which may have waited for a copy."""
        self._reads.append((begin, self.now()))

    def turn(self) -> None:
        """Note the beginning or the end of the backward pass."""
        self._backward.append(self.now())

    def slot_times_ms(self, assembly: StepAssembly, launching_ms: Sequence[float]) -> list[float] | None:
        """Return the device's time for the op of each slot in ms, or None if the marks do not belong to the assembly.

        Ops between two reads share the time between them as they share the host's time.

        Args:
            assembly: The recorded step. The device has finished it.
            launching_ms: What the host took for the op of each slot.
        """
        calls = [op.call for op in assembly.recorder.ops]
        if len(self._backward) != 2 or len(self._reads) != len(assembly.unpack_slots):
            return None
        if not all(call in self._around for call in calls):
            return None
        times_ms = [_ms(*self._around[call]) for call in calls]
        begin, end = self._backward
        marks = [begin, *(mark for read in self._reads for mark in read), end]
        slots = [assembly.forward_ops, *assembly.unpack_slots, assembly.end - 1]
        for number, (first, behind) in enumerate(pairwise(slots)):
            weights = launching_ms[first:behind]
            whole_ms, total = _ms(marks[2 * number], marks[2 * number + 1]), sum(weights)
            times_ms += [whole_ms * weight / total if total else whole_ms / len(weights) for weight in weights]
        times_ms.append(0.0)
        return times_ms if len(times_ms) == assembly.end else None


def _ms(begin: Mark, end: Mark) -> float:
    return float(begin.elapsed_time(end))
