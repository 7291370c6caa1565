"""Reads what the allocator reported to torch's profiler: each allocation and each free, with its address."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from torch._C._autograd import DeviceType

from ..ground.errors import ProfileError, first_line
from ..ground.folders import TemporaryFolder

MEMORY_EVENT = "[memory]"  # torch's name for a report of its allocators


@dataclass(frozen=True, slots=True, order=True)
class MemoryEvent:
    """An allocation or a free.

    Attributes:
        time_ns: when it happened.
        pointer: the address.
        size_bytes: positive for an allocation, negative for a free; as the allocator counts, which on a GPU is in whole
            blocks, multiples of 512 bytes.
    """

    time_ns: int
    pointer: int
    size_bytes: int


def reported_memory(results: Any, device: torch.device, in_tree: Sequence[MemoryEvent]) -> tuple[MemoryEvent, ...]:
    """Returns every allocation and free on the device, in order of time.

    The profiler's list of events has the times and sizes of all of them, but no addresses. Its tree has addresses, but
    unless the memory is the CPU's it misses what happened outside of any op: `nn.Sequential` releases an output between
    two ops, and autograd between two nodes. If the tree misses some, all are read from the trace file that the profiler
    writes.

    Args:
        results: the results of torch's profiler (`kineto_results`).
        device: the device whose memory is traced.
        in_tree: the events that the profiler's tree has.

    Raises:
        ProfileError: if the profiler's list and its file do not agree, or the file could not be written.
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
    return tuple(sorted(events, key=lambda event: event.time_ns))


def _kind(device: torch.device) -> int:
    """Returns the profiler's number for the device's type."""
    kinds: dict[str, int] = {name.lower(): kind.value for name, kind in DeviceType.__members__.items()}
    custom = device.type == torch._C._get_privateuse1_backend_name()
    return kinds["privateuse1" if custom else device.type]


def _is_on(device: torch.device, kind: int, event_kind: Any, event_index: int) -> bool:
    return int(event_kind) == kind and (device.index is None or event_index in (device.index, -1))


def _written(results: Any, device: torch.device, kind: int) -> list[MemoryEvent]:
    """Reads memory events from the profiler's trace file, which each session can write only once."""
    with TemporaryFolder() as folder:
        path = folder / "trace.json"
        try:
            results.save(str(path))
            reports, base_ns = _reports_in(path.read_text(errors="replace"))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ProfileError(
                f"torch's profiler could not write its trace to {folder} ({first_line(error)}): set TMPDIR to a "
                "directory with room"
            ) from error
    return [
        MemoryEvent(base_ns + int(time_us * 1000), fields["Addr"], fields["Bytes"])
        for time_us, fields in reports
        if _is_on(device, kind, fields["Device Type"], fields["Device Id"])
    ]


def _reports_in(text: str) -> tuple[list[tuple[Decimal, dict[str, int]]], int]:
    """Returns the memory events in a trace file as (time in us, fields), and the base of these times in ns."""
    reports: list[tuple[Decimal, dict[str, int]]] = []

    def keep(found: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in found:
            return found
        if found.get("name") == MEMORY_EVENT:
            reports.append((found["ts"], found["args"]))
        return None  # drop all others, of which a long step writes hundreds of thousands

    whole = json.loads(text, object_hook=keep, parse_float=Decimal, strict=False)
    return reports, int(whole.get("baseTimeNanoseconds", 0))
