"""Page-locked host memory of exactly the size that is asked for."""

from __future__ import annotations

import mmap
import os
import weakref

import psutil
import torch

from pooch.errors import TierError
from pooch.torchtools import accelerators, cuda_only


class PinnedBlock:
    """Host memory that copy streams can reach by themselves. PyTorch's own pinned blocks are rounded up to a power of
    two; this one is an anonymous mapping, so it begins at a page (a page cannot be locked twice), goes back to the
    system at once, and is shared with forks instead of being copied under the device's hands.

    Args:
        size_bytes: exactly this many are locked.
        device: a CUDA device, synchronized before the memory is unlocked.

    Raises:
        TierError: the machine has not so much memory, or it cannot be locked.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self.in_use_until: tuple[torch.Event, ...] = ()  # ends of the last copies, for whoever has it next
        mapping = _map(size_bytes)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        pointer = self.bytes.data_ptr()
        code = cuda_only.lock_pages(pointer, size_bytes, device)
        if code != 0:
            raise TierError(
                f"{size_bytes} bytes of host memory cannot be page-locked (CUDA error {code}): "
                "set a smaller host budget"
            )
        self.unlock = weakref.finalize(self, _unlock, pointer, device, mapping, os.getpid())
        self.unlock.atexit = False  # the end of the process unlocks by itself


def _map(size_bytes: int) -> mmap.mmap:
    available = psutil.virtual_memory().available
    if size_bytes > available:
        raise TierError(
            f"swapping needs {size_bytes} bytes of host memory, {available} are available: set a smaller host budget"
        )
    try:
        return mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError) as error:
        raise TierError(f"no {size_bytes} bytes of host memory for swapping: set a smaller host budget") from error


def _unlock(pointer: int, device: torch.device, mapping: mmap.mmap, process: int) -> None:
    """Unlock, then let go of the mapping. A fork has no CUDA context and leaves the memory to its parent."""
    if os.getpid() == process:
        accelerators.synchronize(device)
        cuda_only.unlock_pages(pointer)
    del mapping
