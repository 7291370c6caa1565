"""Names around what Pooch does in a step, for the user's profiler; where there is none, nothing is named."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ..ground.units import format_bytes
from .memory_trace import MemoryTracer

_profiler: Any = torch.autograd.profiler
_NOTHING = nullcontext()


def _is_profiled() -> bool:
    """Whether the user runs a profiler of PyTorch's, NVTX ranges included, rather than Pooch one of its own."""
    return _profiler._is_profiler_enabled and not MemoryTracer.running


def copy_range(outwards: bool, copied: torch.UntypedStorage | torch.Tensor) -> AbstractContextManager[object]:
    """Context manager that names a copy to or from the swap tier.

    Args:
        outwards: Whether it leaves the device.
        copied: What is copied. Nobody asks it for anything unless the copy is named.
    """
    if not _is_profiled():
        return _NOTHING
    size_bytes = copied.nbytes if isinstance(copied, torch.Tensor) else copied.nbytes()
    return record_function(f"pooch: copy {'out' if outwards else 'in'} {format_bytes(size_bytes)}")


def replay_range(call: Any) -> AbstractContextManager[object]:
    """Context manager that names a replay.

    Args:
        call: The recorded call, of Python or of the native watch.
    """
    if not _is_profiled():
        return _NOTHING
    return record_function(f"pooch: replay {call.func}")
