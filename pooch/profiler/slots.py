"""A recorded step on the axis of slots: when each op ran, and what was allocated during it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy

from ..ir.plan import GRAPH
from ..torchtools.memory_trace import LINEAR, Span
from ..torchtools.operators import is_view_name
from ..torchtools.reported_memory import MemoryEvent
from .step import ROOM, StepRecord

COMPILED_NODE = "CompiledFunction"  # begins the names of nodes that run backward graphs
COME_BACK = "pooch_graph::come_back"  # unpacks within such a graph
_SUM = "aten.add.Tensor"


@dataclass(frozen=True, slots=True)
class Life:
    """The period during which one storage occupied device memory; without an end if the storage outlived the trace."""

    start_ns: int
    end_ns: int | None
    size_bytes: int


class StepAssembly:
    """A recorded step on the axis of slots."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.recorder = record.recorder
        spans = {span.name: span for span in record.trace.markers}
        self.spans: list[Span] = [spans[f"op {op.call}"] for op in self.recorder.ops]
        self.forward_ops = len(self.spans)
        self._unpack_spans = [spans[f"unpack {i}"] for i in range(len(record.unpacks))]
        rooms = (span for span in record.trace.markers if span.name.startswith(f"{ROOM} "))
        self._room_spans = [span for span in rooms if not _is_within_any(span, self._unpack_spans)]
        backward = [span for span in record.trace.operators if not is_view_name(span.name)]
        if self.recorder.has_graphs:
            backward = with_graph_parts(backward, self._unpack_spans, self._event_times, spans["end"])
        self.spans += [*backward, spans["end"]]
        self.starts = [span.start_ns for span in self.spans]
        self.unpack_slots = [self._slot_of_read(span.start_ns) for span in self._unpack_spans]

    @cached_property
    def last_unpacks(self) -> dict[int, int]:
        """{value id: slot in which the backward pass last reads it}."""
        return {unpack.value: slot for unpack, slot in zip(self.record.unpacks, self.unpack_slots, strict=True)}

    @cached_property
    def first_unpacks(self) -> dict[int, int]:
        """{value id: number of its first unpack}."""
        numbers: dict[int, int] = {}
        for number, unpack in enumerate(self.record.unpacks):
            if unpack.value >= 0:
                numbers.setdefault(unpack.value, number)
        return numbers

    @property
    def end(self) -> int:
        """Number of slots; as the index of a slot it means "outlives the step"."""
        return len(self.spans)

    def slot_at(self, time_ns: int) -> int:
        """Returns the slot in progress at this time."""
        return max(0, bisect_right(self.starts, time_ns) - 1)

    def next_slot(self, time_ns: int) -> int:
        """Returns the first slot that begins after this time."""
        return min(bisect_right(self.starts, time_ns), self.end - 1)

    def _slot_of_read(self, time_ns: int) -> int:
        """Returns the slot of what an unpack is for: the next one, or the part of a graph that begins with it."""
        slot = self.slot_at(time_ns)
        return slot if slot >= self.forward_ops and self.spans[slot].name == GRAPH else self.next_slot(time_ns)

    def foreign_ns(self, slot: int) -> int:
        """Returns what of the time of a backward op is not its own: making room, and the unpacks that begin a graph."""
        span = self.spans[slot]
        return _within(span, self._room_spans) + (_within(span, self._unpack_spans) if span.name == GRAPH else 0)

    @cached_property
    def measured_points(self) -> numpy.ndarray:
        """Measured live bytes above the start of the step, as an int64 array of shape (2 * slots,)."""
        points = numpy.zeros(2 * self.end, dtype=numpy.int64)
        live, slot = 0, -1
        for event in self.record.trace.events:
            time_ns = self._settled_ns(event.time_ns)
            while slot + 1 < self.end and self.starts[slot + 1] <= time_ns:
                slot += 1
                points[2 * slot] = points[2 * slot + 1] = live
            live += event.size_bytes
            if slot >= 0:
                points[2 * slot + 1] = max(points[2 * slot + 1], live)
        for later in range(slot + 1, self.end):
            points[2 * later] = points[2 * later + 1] = live
        return points

    @cached_property
    def bias_sums(self) -> list[int]:
        """Forward ops that add the bias of a linear layer out of place. PyTorch does so only under a dispatch mode or
        for tensor subclasses; plain training adds the bias in place.
        """
        forward = zip(self.recorder.ops, self.spans, strict=False)
        return [slot for slot, (op, span) in enumerate(forward) if op.name == _SUM and span.within == LINEAR]

    def raised_bytes(self, slot: int) -> int:
        """Returns how many bytes lower the slot's body would be if its op wrote the result over its first input."""
        op, values = self.recorder.ops[slot], self.recorder.values
        made, read = values[op.writes[0]].pointer, values[op.reads[0]].pointer
        begin, end = (bisect_left(self._event_times, self.starts[n]) for n in (slot, slot + 1))
        events = self.record.trace.events[begin:end]
        taken = next((e.size_bytes for e in events if e.pointer == made and e.size_bytes > 0), 0)
        given = next((e.size_bytes for e in events if e.pointer == read and e.size_bytes < 0), 0)
        if taken == 0 or taken != -given:
            return 0
        in_place = [e for e in events if (e.pointer, e.size_bytes) not in ((made, taken), (read, given))]
        return _highest(events) - _highest(in_place)

    @cached_property
    def _event_times(self) -> list[int]:
        return [event.time_ns for event in self.record.trace.events]

    def _settled_ns(self, time_ns: int) -> int:
        """Returns the time; for events during the return of a value, the start of the op that reads the value."""
        number = bisect_right(self._unpack_starts, time_ns) - 1
        if number < 0 or time_ns > self._unpack_spans[number].end_ns:
            return time_ns
        return self.starts[self.unpack_slots[number]]

    @cached_property
    def _unpack_starts(self) -> list[int]:
        return [span.start_ns for span in self._unpack_spans]

    @cached_property
    def _lives_at(self) -> dict[int, list[Life]]:
        lives: dict[int, list[Life]] = {}
        open_lives: dict[int, tuple[int, int]] = {}
        for event in self.record.trace.events:
            if event.size_bytes > 0:
                open_lives[event.pointer] = (event.time_ns, event.size_bytes)
            elif event.pointer in open_lives:
                start, size = open_lives.pop(event.pointer)
                lives.setdefault(event.pointer, []).append(Life(start, event.time_ns, size))
        for pointer, (start, size) in open_lives.items():
            lives.setdefault(pointer, []).append(Life(start, None, size))
        return lives

    @cached_property
    def gradient_bytes(self) -> dict[int, int]:
        """{slot of the backward pass: bytes allocated in it that outlive the step}."""
        found: dict[int, int] = {}
        for life in (life for lives in self._lives_at.values() for life in lives if life.end_ns is None):
            slot = self.slot_at(self._settled_ns(life.start_ns))
            if slot >= self.forward_ops:
                found[slot] = found.get(slot, 0) + life.size_bytes
        return found

    def life(self, pointer: int, time_ns: int) -> Life | None:
        """Returns the life of the storage that was at `pointer` at that time."""
        lives = self._lives_at.get(pointer, [])  # ascending, one after the other
        position = bisect_right(lives, time_ns, key=lambda life: life.start_ns) - 1
        if position < 0:
            return None
        life = lives[position]
        return life if life.end_ns is None or time_ns < life.end_ns else None

    def slot_after_last(self, life: Life) -> int:
        """Returns the last slot in which the storage is held."""
        return self.end if life.end_ns is None else self.slot_at(life.end_ns)


def with_graph_parts(
    operators: Sequence[Span], unpacks: Sequence[Span], event_times: Sequence[int], end: Span
) -> list[Span]:
    """Returns the operators of a backward pass, and the parts of compiled graphs that lie between them.

    Kernels that Inductor makes are no operators. What they allocate would count in the slot of the operator before
    them, in which what they read is not back yet. So where a graph reads what it has saved, a part begins, unless
    nothing happens to memory until the next operator.

    Args:
        operators: in order of time.
        unpacks: reads of saved values, in order of time.
        event_times: of allocations and frees, in order.
        end: the end of the backward pass.
    """
    operators = [span for span in operators if span.name != COME_BACK]
    within = [span for span in unpacks if span.node.startswith(COMPILED_NODE)]
    starts = [span.start_ns for span in operators]
    parts: list[Span] = []
    begin: Span | None = None
    for span, following in pairwise([*within, end]):
        begin = begin or span
        place = bisect_right(starts, span.end_ns)
        next_ns = min([following.start_ns, *starts[place : place + 1]])
        is_part = bisect_left(event_times, next_ns) > bisect_left(event_times, span.end_ns)
        if is_part:
            parts.append(replace(begin, name=GRAPH))
        if is_part or next_ns < following.start_ns:
            begin = None
    spans = sorted([*operators, *parts], key=lambda span: span.start_ns)
    return [
        replace(span, end_ns=following.start_ns) if span.node.startswith(COMPILED_NODE) else span
        for span, following in pairwise([*spans, end])
    ]


def _highest(events: Iterable[MemoryEvent]) -> int:
    """Returns the highest number of live bytes above the start."""
    return max(accumulate((event.size_bytes for event in events), initial=0))


def _within(span: Span, parts: Sequence[Span]) -> int:
    """Returns how long those of some parts, in order of time, last in ns that begin within a span."""
    first, behind = (bisect_left(parts, time_ns, key=_start_ns) for time_ns in (span.start_ns, span.end_ns))
    return sum(part.end_ns - part.start_ns for part in parts[first:behind])


def _is_within_any(span: Span, others: Sequence[Span]) -> bool:
    """Returns whether a span begins within one of others, which are in order of time."""
    place = bisect_right(others, span.start_ns, key=_start_ns) - 1
    return place >= 0 and span.start_ns < others[place].end_ns


def _start_ns(span: Span) -> int:
    return span.start_ns
