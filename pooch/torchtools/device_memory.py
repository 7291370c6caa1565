"""How much memory is left on the device for this process, and keeping freed memory available."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from functools import cache

import psutil
import torch

from ..process_limits import left_by_control_groups, left_by_limits
from . import accelerators

_LARGE_BLOCK_BYTES = 256 * 1024
_SLACK_BYTES = 32 * 2**20
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that this process can still allocate on a device.

    On a CPU, this is the minimum of what `ulimit -d`, `ulimit -v`, the control group and the machine leave. On a GPU,
    it is what is free on the device or cached by the caching allocator.
    """
    if accelerators.has_streams(device):
        return accelerators.available_bytes(device)
    left = [int(psutil.virtual_memory().available), *left_by_limits(), *left_by_control_groups()]
    return max(0, min(left))


def room_bytes(device: torch.device, live_bytes: int) -> int:
    """Returns the total bytes that the process's tensors, which take `live_bytes` now, may take.

    Some slack is left for the measurement itself.
    """
    return live_bytes + free_bytes(device) - _SLACK_BYTES


def give_memory_back(device: torch.device) -> None:
    """Collects garbage and releases cached blocks, so that freed memory is available to the next attempt."""
    gc.collect()
    if accelerators.has_streams(device):
        accelerators.empty_cache(device)
    else:
        _trim()


@cache
def return_large_blocks() -> None:
    """Makes the C library return each large block to the system as soon as it is freed, from now on.

    By default, glibc keeps freed blocks of up to 32 MiB for later, in pieces that do not fit a larger tensor, and
    these count against a memory limit as if they were in use. Fresh blocks from the system cost page faults, so this is
    only done where memory is limited.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
