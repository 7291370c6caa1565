"""Limits on the memory of this process: resource limits and control groups."""

from __future__ import annotations

import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def is_limited() -> bool:
    """Whether a resource limit bounds the memory of this process, so that it may run out before that of the machine."""
    return any(_soft_limit(kind) != resource.RLIM_INFINITY for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))


def _soft_limit(kind: int) -> int:
    return resource.getrlimit(kind)[0]


def left_by_limits() -> list[int]:
    """Bytes that the soft limits on private writable memory (VmData) and on address space (VmSize) leave."""
    used_kib = _status_kib()
    soft = ((_soft_limit(resource.RLIMIT_DATA), "VmData"), (_soft_limit(resource.RLIMIT_AS), "VmSize"))
    return [
        limit - 1024 * used_kib[name] for limit, name in soft if limit != resource.RLIM_INFINITY and name in used_kib
    ]


def _status_kib() -> dict[str, int]:
    """Sizes of this process in KiB by their names in /proc/self/status; empty if there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(size) for name, size, *_ in fields}


def left_by_control_groups() -> list[int]:
    """Bytes that the control groups (version 2) of this process leave; inactive pages of files count as free."""
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
