"""Builds a profile from a recorded step: this is where the memory trace meets the recorded ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..ir import GatheredUnit, Op, Profile, Value
from ..torchtools.tensors import model_signature
from .recorder import GRAPHS_RUN, ValueRecord
from .session import ProfileOptions
from .slots import StepAssembly

# Planning smaller values costs more (hooks, solver time) than their bytes are worth.
SMALLEST_ACTIVATION_BYTES = 16 * 1024


def assembled_profile(
    assembly: StepAssembly,
    model: torch.nn.Module,
    options: ProfileOptions,
    times_ms: Sequence[float],
    persistent_bytes: int,
    released_bytes: int = 0,
    **others: Any,
) -> Profile:
    """Builds the profile.

    Args:
        assembly: the recorded step.
        model: what was trained.
        options: how it was recorded.
        times_ms: of the slots.
        persistent_bytes: that were live before the step.
        released_bytes: of these, what was released before the backward pass, unless the trace tells of it.
        others: fields of the profile that the recorded step does not determine.
    """
    points = assembly.measured_points.copy()
    values = tuple(_make_value(assembly, record) for record in assembly.recorder.values)
    hooked_bytes = {slot: raised for slot in assembly.bias_sums if (raised := assembly.raised_bytes(slot))}
    for slot, raised in hooked_bytes.items():
        points[2 * slot + 1] -= raised
    points += persistent_bytes
    points[2 * assembly.forward_ops :] -= released_bytes
    begin, end = assembly.recorder.model_extent()
    name = options.workload or type(model).__name__
    return Profile(
        workload=name.encode("utf-8", "backslashreplace").decode(),  # as bytes of a path that are no text
        ops=tuple(_ops(assembly, points.tolist(), times_ms, hooked_bytes)),
        values=values,
        anchors=_anchors(assembly, values),
        forward_ops=assembly.forward_ops,
        model_begin=begin,
        model_end=end,
        persistent_bytes=persistent_bytes,
        peak_bytes=int(points.max()),
        model_signature=model_signature(model),
        batch_size=options.batch_size,
        gathered=_gathered_units(assembly),
        accumulates=options.accumulate,
        **others,
    )


def _gathered_units(assembly: StepAssembly) -> tuple[GatheredUnit, ...]:
    """Returns the units in which FSDP gathers parameters, each with the windows in which its parameters are there.

    They are looked for at each read by the backward pass, which is where a schedule acts. Those of a slot in which they
    come or go between two reads are in none of the windows.
    """
    recorder = assembly.recorder
    there: dict[int, frozenset[int]] = {}
    for unpack, slot in zip(assembly.record.unpacks, assembly.unpack_slots, strict=True):
        there[slot] = there.get(slot, unpack.units) & unpack.units
    units = []
    for number, unit in enumerate(recorder.units):
        values = tuple(value for value, other in sorted(recorder.unit_of.items()) if other == number)
        if values:
            units.append(GatheredUnit(unit.name, values, _windows(there, number)))
    return tuple(units)


def _windows(there: Mapping[int, frozenset[int]], unit: int) -> tuple[tuple[int, int], ...]:
    """Returns the first and the last slot of each run of reads at which a unit is gathered."""
    windows: list[tuple[int, int]] = []
    is_open = False
    for slot in sorted(there):
        if unit in there[slot]:
            windows[len(windows) - is_open :] = [(windows[-1][0] if is_open else slot, slot)]
        is_open = unit in there[slot]
    return tuple(windows)


def _anchors(assembly: StepAssembly, values: Sequence[Value]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns (slot, values that the backward pass first reads there), by slot."""
    anchors: dict[int, list[int]] = {}
    for value_id, number in sorted(assembly.first_unpacks.items(), key=lambda item: item[1]):
        if values[value_id].role == "made":  # the runtime recognizes only values that it saw being created
            anchors.setdefault(assembly.unpack_slots[number], []).append(value_id)
    return tuple((slot, tuple(anchors[slot])) for slot in sorted(anchors))


def _make_value(assembly: StepAssembly, record: ValueRecord) -> Value:
    released = record.released_after
    release = assembly.end if released is None else max(released, record.producer)
    allocated, death = record.size_bytes, release
    if record.producer >= 0:
        born = assembly.life(record.pointer, assembly.spans[record.producer].end_ns)
        if born is not None:
            allocated, death = born.size_bytes, assembly.slot_after_last(born)
    number = assembly.first_unpacks.get(record.id, -1)
    first_unpack = assembly.unpack_slots[number] if number >= 0 else -1
    death = max(death, assembly.last_unpacks.get(record.id, -1))  # the allocator never sees an empty storage
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
        touches=None if record.touches is None or assembly.recorder.has_graphs else tuple(sorted(record.touches)),
        packs=record.packs,
    )


def _why_fixed(record: ValueRecord, release: int, first_unpack: int) -> str | None:
    if record.beside:
        return "the program uses it on another stream"
    if record.role == "transient":
        return "the program itself empties and refills its storage, as FSDP does with parameters"
    if record.role != "made":
        return f"{record.role}: existed before the step"
    if record.elsewhere:
        return f"it is on another device ({record.elsewhere})"
    if not record.saved:
        return "autograd does not save it"
    if first_unpack < 0:
        return "the backward pass never reads it"
    if record.overwritten_at >= 0:
        return "an in-place op overwrites it"
    if release >= first_unpack:
        return "the program itself holds it until the backward pass"
    if record.size_bytes < SMALLEST_ACTIVATION_BYTES:
        return f"smaller than {SMALLEST_ACTIVATION_BYTES} bytes"
    return None


def _held_by_earlier_contents(values: Sequence[ValueRecord], record: ValueRecord) -> str | None:
    """Returns a reason if autograd also holds the storage for earlier contents.

    `nn.LSTMCell` on a CPU does this: its gates are parts of one storage, and each is modified in place and saved.
    """
    earlier = record.overwrites
    while earlier >= 0:
        if values[earlier].saved:
            return "autograd also holds its storage for earlier contents"
        earlier = values[earlier].overwrites
    return None


def _ops(
    assembly: StepAssembly, points: Sequence[int], times_ms: Sequence[float], hooked_bytes: Mapping[int, int]
) -> Iterator[Op]:
    """Yields the ops of the whole step, without host times.

    `points` are the live bytes in-core at the two points of each slot, persistent bytes included; `hooked_bytes` are
    those by which hooks raise the body of a slot.
    """
    for index, span in enumerate(assembly.spans):
        entry, peak = points[2 * index], points[2 * index + 1]
        if index < assembly.forward_ops:
            record = assembly.recorder.ops[index]
            refusal = GRAPHS_RUN if assembly.recorder.has_graphs else record.refusal
            yield Op(
                index, record.name, "forward", record.module, times_ms[index], entry, peak,
                record.reads, record.writes, record.fingerprint, refusal, record.random,
                hooked_bytes=hooked_bytes.get(index, 0), views=record.views,
            )  # fmt: skip
        else:
            name = span.name if index < assembly.end - 1 else "pooch.end"
            made = assembly.gradient_bytes.get(index, 0)
            yield Op(index, name, "backward", span.node, times_ms[index], entry, peak, gradient_bytes=made)
