"""Limits on the memory of this process: resource limits, and control groups of both versions."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

_CGROUP, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 says so by a number that no machine comes near


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
    """Bytes that the control groups of this process leave; inactive pages of files count as free."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _left_up_from(_CGROUP, path, _left_in)
        elif "memory" in controllers.split(","):
            left += _left_up_from(_CGROUP / "memory", path, _left_in_version_1)
    return left


def _left_up_from(root: Path, path: str, left_in: Callable[[Path], list[int]]) -> list[int]:
    """What the groups from a path up to the root leave. In a container, only the root may be there."""
    folder, left = root / path.strip().lstrip("/"), []
    while folder.is_relative_to(root):
        left += left_in(folder)
        folder = folder.parent
    return left


def _left_in(group: Path) -> list[int]:
    try:
        most, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [] if most == "max" else [int(most) - used + int(pages.get("inactive_file", 0))]


def _left_in_version_1(group: Path) -> list[int]:
    try:
        most, used = (int((group / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [] if most >= _NO_LIMIT else [most - used + int(pages.get("total_inactive_file", 0))]
