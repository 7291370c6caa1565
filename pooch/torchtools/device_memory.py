"""How much memory the device has left for this process, and keeping freed memory available."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from functools import cache

import psutil
import torch

from pooch.process_limits import left_by_control_groups, left_by_limits
from pooch.torchtools import accelerators

_LARGE_BLOCK_BYTES = 256 * 1024
_SLACK_BYTES = 32 * 2**20
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device.

    On a CPU this is the least of what `ulimit -d` and `ulimit -v`, the control group and the machine leave. On a GPU it
    is what the card has free, and what the caching allocator holds without using it.
    """
    if accelerators.has_streams(device):
        return accelerators.available_bytes(device)
    left = [int(psutil.virtual_memory().available), *left_by_limits(), *left_by_control_groups()]
    return max(0, min(left))


def room_bytes(device: torch.device, live_bytes: int) -> int:
    """Bytes that the process's tensors may take in all, with a little left for what measuring itself takes.

    Args:
        device: where they lie.
        live_bytes: what they take now.
    """
    return live_bytes + free_bytes(device) - _SLACK_BYTES


def give_memory_back(device: torch.device) -> None:
    """Collect garbage and return cached blocks, so that what was let go of is free for the next attempt."""
    gc.collect()
    if accelerators.has_streams(device):
        accelerators.empty_cache(device)
    else:
        _trim()


@cache
def return_large_blocks() -> None:
    """From now on, let the C library give each large block back to the system as soon as it is freed.

    By default glibc keeps freed blocks of up to 32 MiB for later, in pieces that a larger tensor does not fit into.
    Under a limit these count as if they were in use. Blocks that come fresh from the system cost page faults, so this
    is only done where memory is limited.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
