"""The memory of a step as a snapshot of `torch.cuda.memory`, for PyTorch's own viewer and its converters.

Each block has frames that tell, from the outside in, what is done with it, what it is, and why. What is there
throughout the step is one block in a segment of its own, as if the caching allocator had been asked for it before.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ..ir.files import replace_file
from ..ir.lives import Life, StepLives

Snapshot = dict[str, Any]
Event = dict[str, Any]
Frames = list[dict[str, Any]]

PROTOCOL = 4  # the viewer reads 2 to 4
_OUTSIDE_ADDRESS = 0x10_0000_0000
_REGION_ADDRESS = 0x1000_0000_0000
_STREAM = 0
_DEVICE = 0
# The viewer colours blocks by their categories, and where there are any asks for one of this name.
_UNKNOWN = "unknown"


def write_memory_viz(lives: StepLives, path: Path) -> None:
    """Write the snapshot.

    Raises:
        FileFormatError: the file cannot be written.
    """
    replace_file(path, pickle.dumps(memory_snapshot(lives), protocol=PROTOCOL))


def memory_snapshot(lives: StepLives) -> Snapshot:
    """The snapshot: what `torch.cuda.memory._snapshot` gives after the step, with the events that led there."""
    whole = _frames("outside of the step", "parameters, optimizer state and what else stays", lives.name, -1)
    outside = _alloc(_OUTSIDE_ADDRESS, lives.outside_bytes, whole, 0, "outside of the step")
    events = [
        _segment(_OUTSIDE_ADDRESS, lives.outside_bytes),
        _segment(_REGION_ADDRESS, lives.region_bytes),
        outside,
        *_events(lives),
    ]
    here = [life for life in lives.lives if life.end is None]
    blocks = [(_REGION_ADDRESS + life.address, life.size_bytes, frames_of(life)) for life in here]
    segments = [
        _final(_OUTSIDE_ADDRESS, lives.outside_bytes, [(_OUTSIDE_ADDRESS, lives.outside_bytes, whole)]),
        _final(_REGION_ADDRESS, lives.region_bytes, blocks),
    ]
    return {
        "segments": [segment for segment in segments if segment["total_size"]],
        "device_traces": [[event for event in events if event["size"]]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def frames_of(life: Life) -> Frames:
    """What the viewer shows of a block, the innermost frame first."""
    return _frames(life.decision, life.label, life.why, life.number)


def _frames(decision: str, label: str, why: str, number: int) -> Frames:
    frames = [_frame(why, "why", 0)] if why else []
    return [*frames, _frame(label, "value", max(number, 0)), _frame(decision, "decision", 0)]


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    # Converters part frames with semicolons, and leave out frames with the names of C functions.
    return {"name": name.replace(";", ",").replace("_start", "_ start"), "filename": filename, "line": line}


def _events(lives: StepLives) -> list[Event]:
    """Releases and allocations in their order; at the same place, releases come first."""
    ordered: list[tuple[tuple[int, int, int], list[Event]]] = []
    for position, life in enumerate(lives.lives):
        address, frames = _REGION_ADDRESS + life.address, frames_of(life)
        made = _alloc(address, life.size_bytes, frames, life.begin_us, life.decision)
        ordered.append(((life.begin, 1, position), [made]))
        if life.end is not None:
            freed = [_freed(action, address, life, frames) for action in ("free_requested", "free_completed")]
            ordered.append(((life.end, 0, position), freed))
    ordered.sort(key=lambda each: each[0])
    return [event for _, events in ordered for event in events]


def _alloc(address: int, size_bytes: int, frames: Frames, time_us: int, category: str) -> Event:
    return _event("alloc", address, size_bytes, frames, time_us) | {"category": category}


def _freed(action: str, address: int, life: Life, frames: Frames) -> Event:
    return _event(action, address, life.size_bytes, frames, life.end_us)


def _segment(address: int, size_bytes: int) -> Event:
    return _event("segment_alloc", address, size_bytes, [], 0) | {"category": _UNKNOWN}


def _event(action: str, address: int, size_bytes: int, frames: Frames, time_us: int) -> Event:
    return {
        "action": action, "addr": address, "size": size_bytes, "stream": _STREAM, "frames": frames, "time_us": time_us,
    }  # fmt: skip


def _final(address: int, total_bytes: int, blocks: list[tuple[int, int, Frames]]) -> Snapshot:
    """A segment as it is after the step: its blocks, and the gaps between them."""
    filled: list[Snapshot] = []
    place = address
    for begin, size_bytes, frames in sorted(block for block in blocks if block[1]):
        filled += [_gap(place, begin - place)] if begin > place else []
        filled.append(_block(begin, size_bytes, size_bytes, "active_allocated", frames))
        place = begin + size_bytes
    end = address + total_bytes
    filled += [_gap(place, end - place)] if end > place else []
    here = sum(block[1] for block in blocks)
    return {
        "device": _DEVICE,
        "address": address,
        "total_size": total_bytes,
        "allocated_size": here,
        "active_size": here,
        "requested_size": here,
        "stream": _STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": filled,
    }


def _gap(address: int, size_bytes: int) -> Snapshot:
    return _block(address, size_bytes, 0, "inactive", [])


def _block(address: int, size_bytes: int, requested_bytes: int, state: str, frames: Frames) -> Snapshot:
    return {
        "address": address, "size": size_bytes, "requested_size": requested_bytes, "state": state, "frames": frames,
    }  # fmt: skip
