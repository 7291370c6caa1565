"""From a recorded step to slots, spans and values: where the memory trace meets the recorded ops."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy

from pooch.ir import Op, Value
from pooch.profiler.recorder import ForwardRecorder, ValueRecord
from pooch.profiler.step import StepRecord
from pooch.torchtools.memory_trace import LINEAR, Span
from pooch.torchtools.operators import is_view_name
from pooch.torchtools.reported_memory import MemoryEvent

# Deciding on smaller values costs more (hooks, solver) than their bytes are worth.
SMALLEST_ACTIVATION_BYTES = 16 * 1024
SUM = "aten.add.Tensor"


@dataclass(frozen=True, slots=True)
class Life:
    """When one storage lay in device memory, in ns; `end_ns` is None where it outlived the trace."""

    start_ns: int
    end_ns: int | None
    size_bytes: int


def _highest(events: Iterable[MemoryEvent]) -> int:
    """Highest live bytes above the start."""
    return max(accumulate((event.size_bytes for event in events), initial=0))


def _start_of(life: Life) -> int:
    return life.start_ns


class StepAssembly:
    """Puts one recorded step on the axis of slots.

    Args:
        record: the recorded step.
        released: the recorder of the pass in which autograd kept nothing.
    """

    def __init__(self, record: StepRecord, released: ForwardRecorder) -> None:
        self.record = record
        self.recorder = record.recorder
        self.released = released
        spans = {span.name: span for span in record.trace.markers}
        self.spans: list[Span] = [spans[f"op {op.call}"] for op in self.recorder.ops]
        self.forward_ops = len(self.spans)
        self.spans += [span for span in record.trace.operators if not is_view_name(span.name)]
        self.spans.append(spans["end"])
        self.starts = [span.start_ns for span in self.spans]
        self._unpack_spans = [spans[f"unpack {i}"] for i in range(len(record.unpacks))]
        self.unpack_slots = [self.next_slot(span.start_ns) for span in self._unpack_spans]

    @cached_property
    def last_unpacks(self) -> dict[int, int]:
        """{value id: slot of its last read by the backward pass}."""
        return {unpack.value: slot for unpack, slot in zip(self.record.unpacks, self.unpack_slots, strict=True)}

    @cached_property
    def unpacks_of(self) -> dict[int, list[int]]:
        """{value id: numbers of its unpacks}, ascending."""
        numbers: dict[int, list[int]] = {}
        for number, unpack in enumerate(self.record.unpacks):
            if unpack.value >= 0:
                numbers.setdefault(unpack.value, []).append(number)
        return numbers

    def last_slot_of_node(self, unpack: int) -> int:
        """The last slot of the autograd node that reads by this unpack: only then does autograd let go of the value."""
        return self.slot_at(self._unpack_spans[unpack].node_end_ns)

    @property
    def end(self) -> int:
        """Number of slots, which as a slot means "outlives the step"."""
        return len(self.spans)

    def slot_at(self, time_ns: int) -> int:
        """The slot that lasts at this time."""
        return max(0, bisect_right(self.starts, time_ns) - 1)

    def next_slot(self, time_ns: int) -> int:
        """The first slot that begins after this time."""
        return min(bisect_right(self.starts, time_ns), self.end - 1)

    @cached_property
    def measured_points(self) -> numpy.ndarray:
        """int64 array of shape (2 * slots,): live bytes above the start of the step, as measured."""
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
        """Forward ops that add a linear layer's bias out of place, as PyTorch does under a dispatch mode (or a tensor
        subclass) alone: plain training adds it in place.
        """
        forward = zip(self.recorder.ops, self.spans, strict=False)
        return [slot for slot, (op, span) in enumerate(forward) if op.name == SUM and span.within == LINEAR]

    def raised_bytes(self, slot: int) -> int:
        """How much lower the slot's body would be, had its op written its result over what it reads first."""
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
        """The time, or the start of the op that reads it for what is allocated while a value is brought back."""
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

    def life(self, pointer: int, time_ns: int) -> Life | None:
        """The life of the storage that lay at `pointer` at that time."""
        lives = self._lives_at.get(pointer, [])  # ascending, one after the other
        position = bisect_right(lives, time_ns, key=_start_of) - 1
        if position < 0:
            return None
        life = lives[position]
        return life if life.end_ns is None or time_ns < life.end_ns else None

    def slot_after_last(self, life: Life) -> int:
        """Last slot in which the storage is held."""
        return self.end if life.end_ns is None else self.slot_at(life.end_ns)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What assembly hands on: values, ops without times, anchors, the in-core curve above the start, and how far hooks
    raise it in the body of some slots.
    """

    values: tuple[Value, ...]
    anchors: tuple[tuple[int, tuple[int, ...]], ...]
    in_core_points: numpy.ndarray
    hooked_bytes: dict[int, int]


def assemble_values(assembly: StepAssembly) -> StepFacts:
    """Lifetimes of all values, and the curve as it would be with every saved value kept on the device."""
    points = assembly.measured_points.copy()
    first_unpacks = {value: numbers[0] for value, numbers in assembly.unpacks_of.items()}
    values = [_make_value(assembly, record, first_unpacks, points) for record in assembly.recorder.values]
    anchors: dict[int, list[int]] = {}
    for value_id, number in sorted(first_unpacks.items(), key=lambda item: item[1]):
        if values[value_id].role == "made":  # the runtime recognises only values that it saw being made
            anchors.setdefault(assembly.unpack_slots[number], []).append(value_id)
    ordered = tuple((slot, tuple(anchors[slot])) for slot in sorted(anchors))
    hooked_bytes = {slot: raised for slot in assembly.bias_sums if (raised := assembly.raised_bytes(slot))}
    for slot, raised in hooked_bytes.items():
        points[2 * slot + 1] -= raised
    return StepFacts(tuple(values), ordered, points, hooked_bytes)


def _make_value(
    assembly: StepAssembly, record: ValueRecord, first_unpacks: dict[int, int], points: numpy.ndarray
) -> Value:
    released = assembly.released.values[record.id].released_after
    release = assembly.end if released is None else max(released, record.producer)
    allocated, death = record.size_bytes, release
    if record.producer >= 0:
        born = assembly.life(record.pointer, assembly.spans[record.producer].end_ns)
        if born is not None:
            allocated, death = born.size_bytes, _fill_absence(assembly, record, born, points)
    number = first_unpacks.get(record.id, -1)
    first_unpack = assembly.unpack_slots[number] if number >= 0 else -1
    death = max(death, assembly.last_unpacks.get(record.id, -1))  # an empty storage has no life at the allocator
    return Value(
        id=record.id,
        size_bytes=record.size_bytes,
        allocated_bytes=allocated,
        role=record.role,  # type: ignore[arg-type]
        producer=record.producer,
        overwrites=record.overwrites,
        overwritten_at=record.overwritten_at,
        label=record.label,
        dtype=record.dtype,
        shape=record.shape,
        saved=record.saved,
        saved_outside_model=record.saved_outside_model,
        release=release,
        first_unpack=first_unpack,
        death=death,
        fixed=_why_fixed(record, release, first_unpack) or _held_by_earlier_contents(assembly.recorder.values, record),
        touches=None if record.touches is None else tuple(sorted(record.touches)),
    )


def _fill_absence(assembly: StepAssembly, record: ValueRecord, born: Life, points: numpy.ndarray) -> int:
    """Where the value was off the device while recorded (mode "offload"), add it to the curve; returns its death
    in-core.

    Lives are told apart by their time: the allocator likes to give a value back the address that it had.
    """
    life, death, unpack = born, assembly.slot_after_last(born), -1
    for number in assembly.unpacks_of.get(record.id, ()):
        if life.end_ns is None:
            break
        slot = assembly.unpack_slots[number]
        back = assembly.life(assembly.record.unpacks[number].pointer, assembly.starts[slot])
        if back is None or back.start_ns < life.end_ns:
            continue
        if slot > death:
            points[2 * death + 2 : 2 * slot + 1] += born.size_bytes  # its own bytes are in the slot's body
        life, death, unpack = back, assembly.slot_after_last(back), number
    if unpack >= 0 and assembly.last_slot_of_node(unpack) > death:  # what came back died as soon as it was read
        last = assembly.last_slot_of_node(unpack)
        points[2 * death + 2 : 2 * last + 2] += born.size_bytes
        death = last
    return death


def _why_fixed(record: ValueRecord, release: int, first_unpack: int) -> str | None:
    if record.beside:
        return "the program works on it on another stream"
    if record.role == "transient":
        return "the program itself empties and fills its storage, as FSDP does with parameters"
    if record.role != "made":
        return f"{record.role}: existed before the step"
    if record.elsewhere:
        return f"it lies on another device ({record.elsewhere})"
    if not record.saved:
        return "autograd does not save it"
    if first_unpack < 0:
        return "the backward pass never reads it"
    if record.overwritten_at >= 0:
        return "an in-place op writes over it"
    if release >= first_unpack:
        return "the program itself holds it until the backward pass"
    if record.size_bytes < SMALLEST_ACTIVATION_BYTES:
        return f"smaller than {SMALLEST_ACTIVATION_BYTES} bytes"
    return None


def _held_by_earlier_contents(values: Sequence[ValueRecord], record: ValueRecord) -> str | None:
    """Whether autograd holds the storage for contents that it had before as well.

    `nn.LSTMCell` on a CPU does this: each gate is a part of one storage, changed in place and saved by itself.
    """
    earlier = record.overwrites
    while earlier >= 0:
        if values[earlier].saved:
            return "autograd holds its storage for earlier contents too"
        earlier = values[earlier].overwrites
    return None


def assemble_ops(
    assembly: StepAssembly, points: Sequence[int], times_ms: Sequence[float], hooked_bytes: Mapping[int, int]
) -> tuple[Op, ...]:
    """Ops of the whole step, without the host's times. `points`: in-core live bytes, persistent ones included;
    `times_ms`: one per slot; `hooked_bytes`: by slot, where there are any.
    """
    ops: list[Op] = []
    for index, span in enumerate(assembly.spans):
        entry, peak = int(points[2 * index]), int(points[2 * index + 1])
        if index < assembly.forward_ops:
            record = assembly.recorder.ops[index]
            ops.append(
                Op(
                    index, record.name, "forward", record.module, times_ms[index], entry, peak,
                    record.reads, record.writes, record.fingerprint, record.refusal, record.random,
                    hooked_bytes=hooked_bytes.get(index, 0),
                )
            )  # fmt: skip
        else:
            name = span.name if index < assembly.end - 1 else "pooch.end"
            ops.append(Op(index, name, "backward", span.node, times_ms[index], entry, peak))
    return tuple(ops)
