"""The steps of a training on one CUDA device, as `StepArena` drives them."""

from __future__ import annotations

import torch

from .. import accelerators, cuda_only
from ..cpu_allocator.arena import ALL, ArenaCalls, Integers
from .allocator import CudaArena


class CudaSteps(ArenaCalls):
    """Records and serves what a device's steps ask for. A step is on the stream that is current when it begins.

    Args:
        arena: PyTorch's allocator in this process.
        device: that the model is on.
    """

    alignment_bytes = accelerators.GRANULE_BYTES

    def __init__(self, arena: CudaArena, device: torch.device) -> None:
        super().__init__(arena.functions)
        self._arena = arena
        self._device = accelerators.current_device(device.type) if device.index is None else device

    def record(self) -> None:
        """Begin to record a step. An arena that serves is taken off."""
        self._arena.record(self._device.index, self._stream())

    def serve(
        self,
        sizes: Integers,
        offsets: Integers,
        rooms: Integers,
        arena_bytes: int,
        *,
        canaries: bool = False,
        first: int = 0,
        end: int = ALL,
    ) -> bool:
        """Serve steps from a new arena, whose first step begins now; see `ArenaFunctions.serve`.

        The host cannot look at canaries there.
        """
        stream = self._stream()
        return self._arena.serve(self._device.index, stream, sizes, offsets, rooms, arena_bytes) and (
            self._arena.begin_step(stream, first, end)
        )

    def begin_step(self, first: int = 0, end: int = ALL) -> None:
        """Begin a step, or a part of one. One that cannot be ordered after the last step is not served."""
        self._arena.begin_step(self._stream(), first, end)

    def _stream(self) -> int:
        return cuda_only.current_stream_handle(self._device)
