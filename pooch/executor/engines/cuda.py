"""The CUDA engine: two copy streams, events, and one pinned arena of exactly the planned size.

Everything is ordered by streams: `wait` makes the compute stream wait for an event, and the host goes on. A storage is
let go of only after the compute stream waits for its copy, so the caching allocator may hand it out again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pooch.errors import TierError


@dataclass
class CudaTicket:
    """One copy: the event at its end."""

    event: torch.cuda.Event
    error: BaseException | None = None

    def wait(self) -> float:
        """The compute stream waits; the host does not."""
        torch.cuda.current_stream().wait_event(self.event)
        return 0.0


class CudaArena:
    """Room in one pinned block of host memory."""

    def __init__(self, engine: CudaEngine, pinned: torch.Tensor) -> None:
        self._engine, self._pinned = engine, pinned
        self._out_events: dict[int, torch.cuda.Event] = {}
        self._last: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> CudaTicket:
        """Copy a storage to the host once compute so far is done."""
        stream = self._engine.out_stream
        stream.wait_event(self._engine.mark_compute())
        with torch.cuda.stream(stream):
            self._room(storage, offset_bytes).copy_(_bytes_of(storage), non_blocking=True)
        self._out_events[offset_bytes] = self._last[stream] = event = self._engine.mark(stream)
        return CudaTicket(event)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> CudaTicket:
        """Fill a storage that compute has just taken, after its copy out."""
        stream = self._engine.in_stream
        stream.wait_event(self._engine.mark_compute())
        stream.wait_event(self._out_events[offset_bytes])
        with torch.cuda.stream(stream):
            _bytes_of(storage).copy_(self._room(storage, offset_bytes), non_blocking=True)
        self._last[stream] = event = self._engine.mark(stream)
        return CudaTicket(event)

    def _room(self, storage: torch.UntypedStorage, offset_bytes: int) -> torch.Tensor:
        return self._pinned[offset_bytes : offset_bytes + storage.nbytes()]

    def close(self) -> None:
        """Let the next step have the block. Compute waits for the last copy each way: a step whose backward pass never
        came may end with copies under way, and what they read and fill is about to be given out again.
        """
        for event in self._last.values():
            CudaTicket(event).wait()
        self._last.clear()
        self._out_events.clear()
        self._engine.take_back(self._pinned)


class CudaEngine:
    """Two copy streams and pinned blocks, used again from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.out_stream = torch.cuda.Stream(device)
        self.in_stream = torch.cuda.Stream(device)
        self._free: list[torch.Tensor] = []
        self._size_bytes = 0
        self._closed = False

    @property
    def description(self) -> str:
        """What the tier is, for people."""
        return "pinned host memory"

    def mark_compute(self) -> torch.cuda.Event:
        """An event at the end of what compute was given so far."""
        return self.mark(torch.cuda.current_stream(self._device))

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event at the end of what a stream was given so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def open_arena(self, size_bytes: int) -> CudaArena:
        """A pinned block of `size_bytes`: one that is free, or a new one."""
        if size_bytes > self._size_bytes:
            self._unpin_free()
            self._size_bytes = size_bytes
        return CudaArena(self, self._free.pop() if self._free else self._pin())

    def _pin(self) -> torch.Tensor:
        """Page-lock ordinary memory: asking PyTorch for pinned memory rounds up to a power of two."""
        try:
            block = torch.empty(max(1, self._size_bytes), dtype=torch.uint8)
        except RuntimeError as error:
            raise TierError(f"no {self._size_bytes} bytes of host memory for swapping: set a host budget") from error
        code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        if int(code) != 0:
            raise TierError(f"{self._size_bytes} bytes of host memory cannot be page-locked (CUDA error {int(code)})")
        return block

    @contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """A stream of its own takes the place of the compute stream for this thread."""
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream.synchronize

    def take_back(self, pinned: torch.Tensor) -> None:
        """A step is done with its block."""
        if pinned.numel() >= self._size_bytes and not self._closed:
            self._free.append(pinned)
        else:
            self._unpin(pinned)

    def _unpin(self, pinned: torch.Tensor) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())

    def _unpin_free(self) -> None:
        for pinned in self._free:
            self._unpin(pinned)
        self._free.clear()

    def close(self) -> None:
        """Unlock the blocks once the device is done with them; those of steps under way when they are done."""
        self._closed = True
        self._unpin_free()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
