"""What the allocator told torch's profiler: each allocation and each free, with its address."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from pooch.errors import ProfileError

MEMORY_EVENT = "[memory]"  # what torch names a report of its allocators


@dataclass(frozen=True, slots=True, order=True)
class MemoryEvent:
    """An allocation (size_bytes > 0) or a free (size_bytes < 0) at address `pointer`. The bytes are those that the
    allocator counts: on a GPU whole blocks, multiples of 512.
    """

    time_ns: int
    pointer: int
    size_bytes: int


def reported_memory(results: Any, device: torch.device, in_tree: Sequence[MemoryEvent]) -> tuple[MemoryEvent, ...]:
    """Every allocation and free on the device, in order of time.

    The profiler's list of events has the time and the bytes of all of them, and no address. Its tree has addresses, and
    loses what happened outside of any op, unless the memory is the CPU's: `nn.Sequential` lets go of an output between
    two ops, and so does autograd between two nodes. Where the tree lacks some, all are read from the trace file that
    the profiler writes.

    Args:
        results: of torch's profiler (`kineto_results`).
        device: whose memory.
        in_tree: those of its events that the profiler's tree has.

    Raises:
        ProfileError: the profiler's list and its file do not agree, or the file could not be written.
    """
    kind = _kind(device)
    listed = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == MEMORY_EVENT and _is_on(device, kind, event.device_type(), event.device_index())
    )
    events = in_tree if len(in_tree) == len(listed) else _written(results, device, kind)
    if sorted((event.time_ns, event.size_bytes) for event in events) != listed:
        raise ProfileError(
            f"torch's profiler lists {len(listed)} allocations and frees, and names the addresses of {len(events)}: "
            f"the memory of the step cannot be measured with PyTorch {torch.__version__}"
        )
    return tuple(sorted(events, key=_time_of))


def _time_of(event: MemoryEvent) -> int:
    return event.time_ns


def _kind(device: torch.device) -> int:
    """The device's type as the profiler numbers it."""
    kinds: dict[str, int] = {name.lower(): kind.value for name, kind in DeviceType.__members__.items()}
    custom = device.type == torch._C._get_privateuse1_backend_name()
    return kinds["privateuse1" if custom else device.type]


def _is_on(device: torch.device, kind: int, event_kind: Any, event_index: int) -> bool:
    return int(event_kind) == kind and (device.index is None or event_index in (device.index, -1))


def _written(results: Any, device: torch.device, kind: int) -> list[MemoryEvent]:
    """Memory events from the profiler's trace file (once for each of its sessions)."""
    with tempfile.TemporaryDirectory(prefix="pooch-") as folder:
        path = Path(folder) / "trace.json"
        try:
            results.save(str(path))
            reports, base_ns = _reports_in(path.read_text(errors="replace"))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ProfileError(
                f"torch's profiler could not write its trace to {folder} ({said}): set TMPDIR to a directory with room"
            ) from error
    return [
        MemoryEvent(base_ns + int(time_us * 1000), fields["Addr"], fields["Bytes"])
        for time_us, fields in reports
        if _is_on(device, kind, fields["Device Type"], fields["Device Id"])
    ]


def _reports_in(text: str) -> tuple[list[tuple[Decimal, dict[str, int]]], int]:
    """The memory events in a trace file: (time in us, fields), and the time in ns that all are counted from."""
    reports: list[tuple[Decimal, dict[str, int]]] = []

    def keep(found: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in found:
            return found
        if found.get("name") == MEMORY_EVENT:
            reports.append((found["ts"], found["args"]))
        return None  # a long step writes hundreds of thousands of others

    whole = json.loads(text, object_hook=keep, parse_float=Decimal, strict=False)
    return reports, int(whole.get("baseTimeNanoseconds", 0))
