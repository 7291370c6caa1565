"""A limit on what a device's caching allocator holds of it, used and unused, while a budget bounds that."""

from __future__ import annotations

import torch

from ..ground.errors import UsageError
from . import accelerators, cuda_only
from .endings import end_with


class ReservedLimit:
    """Bounds the bytes that PyTorch's allocator reserves of a device, from `hold` until `lift` or until this is freed.

    An allocation that would pass it has the allocator return what it holds unused first. Where that is not enough,
    memory runs out, as on a device of that size. A limit that was there before is kept if it is lower, and comes back.
    What the allocator holds unused when this is made is returned at once.

    Args:
        device: A CUDA device.
        size_bytes: The limit.

    Raises:
        UsageError: The device has no allocator with such a limit.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        share_before = cuda_only.limited_share(device)
        if share_before is None:
            raise UsageError(
                f"what is reserved on {device.type} cannot be bounded: bound='reserved' is for PyTorch's own caching "
                "allocator on CUDA devices; without it, the budget bounds the bytes of tensors"
            )
        self._device, self._size_bytes, self._share_before = device, size_bytes, share_before
        self._lift = end_with(self, cuda_only.limit_memory, device, share_before)
        accelerators.empty_cache(device)

    def reserved_bytes(self) -> int:
        """Return what the allocator holds of the device now."""
        return accelerators.memory_counters(self._device).get("reserved_bytes.all.current", 0)

    def hold(self) -> None:
        """Bound them from now on, and return what is held unused of what passes the limit already."""
        if self.reserved_bytes() > self._size_bytes:
            accelerators.empty_cache(self._device)
        share = self._size_bytes / accelerators.total_bytes(self._device)
        cuda_only.limit_memory(self._device, min(self._share_before, share))

    def lift(self) -> None:
        """Bound nothing any longer."""
        self._lift()
