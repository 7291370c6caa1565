"""Takes out of a memory trace what an evictor did, so that it shows the step as if nothing had left the device.

Markers of no duration tell: `left VALUE POINTER SIZE` before a value's bytes are freed, and `returned VALUE POINTER
SIZE` after memory for them was allocated again. Without these two events a value's life is what it would have been.
`ended VALUE 0 SIZE` is where autograd releases a value that is away, which would be freed there. Values of other steps
that are alive have negative numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..torchtools.memory_trace import MemoryTrace
from ..torchtools.reported_memory import MemoryEvent
from .recorder import ValueRecord

LEFT, RETURNED, ENDED = "left", "returned", "ended"
_OTHERS = 2**60


def without_absences(trace: MemoryTrace, values: Sequence[ValueRecord]) -> MemoryTrace:
    """Return the trace without the frees and allocations of values that left and returned.

    Each of these values gets an address of its own, which its record is given as well, since the allocator hands its
    former address to others.

    Args:
        trace: The trace with its markers.
        values: The recorded values, changed in place.
    """
    events: list[MemoryEvent | None] = list(trace.events)
    following = {record.overwrites: record for record in values if record.overwrites >= 0}
    ended: list[MemoryEvent] = []
    of_pointer: dict[int, list[int]] = {}
    for number, event in enumerate(trace.events):
        of_pointer.setdefault(event.pointer, []).append(number)

    def before(pointer: int, time_ns: int) -> int | None:
        """The last event at an address before a time."""
        numbers = of_pointer.get(pointer, [])
        position = bisect_right(numbers, time_ns, key=lambda n: trace.events[n].time_ns) - 1
        return numbers[position] if position >= 0 else None

    def after(pointer: int, time_ns: int, is_free: bool = False) -> int | None:
        """The first event at an address after a time, if it is a free where one is asked for.

        The trace does not tell of frees of blocks from before it.
        """
        numbers = of_pointer.get(pointer, [])
        position = bisect_left(numbers, time_ns, key=lambda n: trace.events[n].time_ns)
        found = numbers[position : position + 1]
        return next((n for n in found if not is_free or trace.events[n].size_bytes < 0), None)

    def moved(number: int | None, pointer: int) -> None:
        if number is not None and events[number] is not None:
            events[number] = replace(trace.events[number], pointer=pointer)

    for marker in trace.markers:
        kind, _, rest = marker.name.partition(" ")
        if kind not in (LEFT, RETURNED, ENDED):
            continue
        value, pointer, size_bytes = map(int, rest.split())
        own = -1 - value if value >= 0 else value - _OTHERS
        if kind == ENDED:
            ended.append(MemoryEvent(marker.start_ns, own, -size_bytes))
            continue
        if kind == LEFT:
            freed = after(pointer, marker.start_ns, is_free=True)
            moved(before(pointer, marker.start_ns), own)
            if value >= 0:
                _rename(values, following, value, own)
        else:
            freed = before(pointer, marker.start_ns)
            moved(after(pointer, marker.start_ns), own)
        if freed is not None:
            events[freed] = None
    kept = [event for event in events if event is not None]
    return replace(trace, events=tuple(sorted([*kept, *ended], key=lambda event: event.time_ns)))


def _rename(values: Sequence[ValueRecord], following: Mapping[int, ValueRecord], value: int, pointer: int) -> None:
    """Give a value its own address, and all values that shared its storage with it one after the other.

    Args:
        values: The recorded values.
        following: Those that were written over another one, by the number of that.
        value: The number of the value.
        pointer: Its address.
    """
    chain = values[value]
    while chain.overwrites >= 0:
        chain = values[chain.overwrites]
    while True:
        chain.pointer = pointer
        if chain.id not in following:
            return
        chain = following[chain.id]
