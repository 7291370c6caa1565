"""What outlives a recorded step, and when the step uses it: parameters, buffers, gradients, the optimizer's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ..ground.units import round_up
from ..ir import PersistentTensor
from ..ir.persistent import Kind
from .recorder import OutlivingRecord, ValueRecord
from .slots import StepAssembly

LEAST_BYTES = 64 * 1024  # of what is smaller, moving it gains less than deciding about it takes


def persistent_tensors(
    assembly: StepAssembly, state_bytes: Mapping[str, int], granule_bytes: int = 1
) -> tuple[PersistentTensor, ...]:
    """Returns what could leave of all that outlives a step.

    What the program obtained the address of cannot, nor can what the forward pass writes over, nor what FSDP gathers.

    Args:
        assembly: the recorded step.
        state_bytes: {name of a parameter: bytes of the optimizer's state for it}.
        granule_bytes: of the allocator, which rounds up to a multiple of it.
    """
    unpacked: dict[int, list[int]] = {}
    for unpack, slot in zip(assembly.record.unpacks, assembly.unpack_slots, strict=True):
        unpacked.setdefault(unpack.value, []).append(slot)
    read: dict[int, list[int]] = {}
    for slot, op in enumerate(assembly.recorder.ops):
        for number in op.reads:
            read.setdefault(number, []).append(slot)
    made = _gradients(assembly)
    found: list[PersistentTensor] = []
    for record in assembly.recorder.outliving:
        value = None if record.value is None else assembly.recorder.values[record.value]
        if not _can_leave(record, value):
            continue
        uses: set[int] = set()
        if value is not None:
            uses = {*read.get(value.id, ()), *unpacked.get(value.id, ())}  # views need no bytes
        found += _tensors_of(record, tuple(sorted(uses)), made, state_bytes, granule_bytes)
    return tuple(found)


def _can_leave(record: OutlivingRecord, value: ValueRecord | None) -> bool:
    if record.size_bytes < LEAST_BYTES:
        return False
    if value is None:
        return True
    return value.role in ("parameter", "buffer") and value.overwritten_at < 0 and value.touches is not None


def _tensors_of(
    record: OutlivingRecord,
    uses: tuple[int, ...],
    made: Mapping[str, tuple[int, int]],
    state_bytes: Mapping[str, int],
    granule_bytes: int,
) -> Iterator[PersistentTensor]:
    """Yields a parameter or buffer, and then its gradient and its state, if there are any."""
    name, is_stepped = record.name, record.is_parameter and record.is_trained
    kind: Kind = "parameter" if record.is_parameter else "buffer"
    rounded_bytes = round_up(record.size_bytes, granule_bytes)
    yield PersistentTensor(name, kind, record.size_bytes, rounded_bytes, uses, is_stepped, is_stepped)
    if is_stepped and name in made:
        slot, made_bytes = made[name]
        yield PersistentTensor(name, "gradient", record.size_bytes, made_bytes, (slot,), True, True)
    if is_stepped and state_bytes.get(name, 0) >= LEAST_BYTES:
        yield PersistentTensor(name, "state", state_bytes[name], state_bytes[name], (), True, True)


def _gradients(assembly: StepAssembly) -> dict[str, tuple[int, int]]:
    """Returns {name of a parameter: (the slot that makes its gradient, the bytes that it takes)}.

    Gradients that were there before the step, and those that share a storage, as the buckets of DDP do, are not among
    them.
    """
    last_ns = assembly.spans[-1].end_ns
    holders = Counter(address for _, address in assembly.record.gradients)
    found = {}
    for name, address in assembly.record.gradients:
        life = assembly.life(address, last_ns) if holders[address] == 1 else None
        if life is None or life.end_ns is not None:
            continue
        slot = assembly.slot_at(life.start_ns)
        if slot >= assembly.forward_ops:
            found[name] = slot, life.size_bytes
    return found
