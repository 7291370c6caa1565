"""How much memory is left on the device for this process, and keeping freed memory available."""

from __future__ import annotations

import gc

import psutil
import torch

from ..ground.process_limits import left_by_control_groups, left_by_limits
from . import accelerators
from .malloc import trim_freed_memory

_SLACK_BYTES = 32 * 2**20


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
        trim_freed_memory()
