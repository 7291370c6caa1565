"""How much memory the device has left for this process, and keeping freed memory available."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from functools import cache
from pathlib import Path

import psutil
import torch

_LARGE_BLOCK_BYTES = 256 * 1024
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device.

    On a CPU this is the least of what `ulimit -d` and `ulimit -v`, the control group and the machine leave. On a GPU it
    is what the card has free, and what the caching allocator holds without using it.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    left = [int(psutil.virtual_memory().available), *_left_by_limits(), *_left_by_control_group()]
    return max(0, min(left))


def is_limited() -> bool:
    """Whether a resource limit bounds the memory of this process, so that it can run out while the machine has some."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def give_memory_back(device: torch.device) -> None:
    """Collect garbage and return cached blocks, so that what was let go of is free for the next attempt."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
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


def _left_by_limits() -> list[int]:
    """What the soft limits on private writable memory (VmData) and on address space (VmSize) leave."""
    used_kib = _status_kib()
    pairs = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))
    soft = ((resource.getrlimit(kind)[0], name) for kind, name in pairs)
    return [
        limit - 1024 * used_kib[name] for limit, name in soft if limit != resource.RLIM_INFINITY and name in used_kib
    ]


def _status_kib() -> dict[str, int]:
    """Sizes of this process in KiB, by their names in /proc/self/status; empty where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(size) for name, size, *_ in fields}


def _left_by_control_group() -> list[int]:
    """What the control groups (version 2) around this process leave; pages of files can be given up and count as
    free.
    """
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return []
    folder, left = _CGROUP / own, []
    while folder.is_relative_to(_CGROUP):
        left += _left_in(folder)
        folder = folder.parent
    return left


def _left_in(group: Path) -> list[int]:
    try:
        most, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [] if most == "max" else [int(most) - used + int(pages.get("inactive_file", 0))]
