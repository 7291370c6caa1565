"""The measured peak: highest live device bytes while something runs."""

from __future__ import annotations

import torch

from . import accelerators
from .memory_trace import MemoryTracer, live_bytes, quiet_collector
from .requested_sizes import rounding_bytes


class MemoryMeter:
    """Context manager that measures the highest number of bytes of all the process's tensors on a device.

    On a GPU, it reads the caching allocator's counter. The CPU allocator has none, so the allocations it reports to
    torch's profiler are added to the tensors that were live at the start. The ones of those that are freed inside still
    count, so the figure is never too low.

    Attributes:
        peak_bytes: the peak, after the block.
        rounding_bytes: the part of the peak that a caching allocator handed out beyond what tensors requested, because
            it rounded up or did not split a block; 0 on the CPU. A peak that exceeds a budget by no more than this
            does so for that reason.
        reserved_bytes: the highest number of bytes that the caching allocator held of the GPU, cached memory included;
            None on the CPU.
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
