"""The measured peak: highest live device bytes while something runs."""

from __future__ import annotations

import torch

from pooch.torchtools import accelerators
from pooch.torchtools.memory_trace import MemoryTracer, live_bytes, quiet_collector
from pooch.torchtools.rounding import rounding_bytes


class MemoryMeter:
    """A context; `peak_bytes` afterwards is the highest number of bytes of all the process's tensors on the device.

    On a GPU the caching allocator's own counter. On the CPU, whose allocator keeps none, the allocations that it
    reports to torch's profiler, above the tensors that lived at the start; what lived at the start and is freed inside
    counts as if it stayed, so the figure is never too low.
    `rounding_bytes` is the part of the peak that a caching allocator handed out beyond what tensors asked for, when it
    rounded up or left a block whole; 0 on the CPU. A peak that passes a budget by no more does so for that reason.
    `reserved_bytes` is the most that the caching allocator took from the GPU, what it keeps for later included; None
    on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._quiet = quiet_collector()
        self._tracer: MemoryTracer | None = None
        self._start_bytes = 0
        self.peak_bytes = self.rounding_bytes = 0
        self.reserved_bytes: int | None = None

    def __enter__(self) -> MemoryMeter:
        self._quiet.__enter__()
        if accelerators.has_streams(self._device):
            accelerators.reset_peaks(self._device)
        else:
            self._start_bytes = live_bytes(self._device)
            self._tracer = MemoryTracer(self._device)
            self._tracer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._tracer is None:
            self.peak_bytes = accelerators.peak_allocated_bytes(self._device)
            self.reserved_bytes = accelerators.peak_reserved_bytes(self._device)
            self.rounding_bytes = rounding_bytes(self._device)
        else:
            self.peak_bytes = self._start_bytes + self._tracer.stop().peak_bytes
        self._quiet.__exit__(None, None, None)
