"""The step of one rank of several, from the step of one device and a description of how the model is divided.

Nothing is run. What FSDP2 and DDP allocate beside the step, and when, follows PyTorch's own code
(`torch/distributed/fsdp/_fully_shard`), as does when each collective is started and waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy

from ..ir.modelled_ranks import ModelledRanks
from ..ir.profile import GatheredUnit, Phase, Profile
from .insertion import Insertion, with_inserted
from .sharding import Sharding, Unit
from .unit_spans import UnitSpan, unit_spans

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20  # of DDP, by default
_REFUSAL = "it communicates with other ranks"


def one_rank(profile: Profile, sharding: Sharding) -> Profile:
    """The step of one rank.

    Args:
        profile: of the step of one device that has all of the model, without gradients from before.
        sharding: how the model is divided.

    Returns:
        The profile of a rank, with a note that it is modelled. Collectives stand in it as ops, whose time is that for
        which the device waits for them or copies into and out of their buffers. No plan for it can be applied.

    Raises:
        UsageError: the step is one that is not modelled.
    """
    whole = replace(profile, split=None, splits=(), persistent=())  # what outlives the step is shared among ranks
    made = _sharded(whole, sharding) if sharding.kind == "fsdp" else _data_parallel(whole, sharding)
    return replace(made, model_signature=_ranks_of(made).signature(profile.model_signature))


def _ranks_of(profile: Profile) -> ModelledRanks:
    assert profile.ranks is not None
    return profile.ranks


class _Wire:
    """The clock of the device, and that of the collectives, which run one after the other beside it."""

    def __init__(self) -> None:
        self.now_ms = self.waiting_ms = self.collective_ms = self._free_ms = 0.0

    def start(self, duration_ms: float) -> float:
        """Starts a collective as soon as those before it are over; returns when it ends."""
        self._free_ms = max(self._free_ms, self.now_ms) + duration_ms
        self.collective_ms += duration_ms
        return self._free_ms

    def wait(self, end_ms: float, copy_ms: float) -> float:
        """Waits for a collective, then copies; returns the time of both."""
        waiting_ms = max(0.0, end_ms - self.now_ms)
        self.waiting_ms += waiting_ms
        self.now_ms += waiting_ms + copy_ms
        return waiting_ms + copy_ms


def _rebuilt(
    profile: Profile,
    sharding: Sharding,
    points: numpy.ndarray,
    buffers: numpy.ndarray,
    changed: dict[int, dict[str, object]],
    wire: _Wire,
    gradient_bytes: int,
) -> Profile:
    """The profile with other bytes and other facts of some ops.

    Args:
        profile: with the collectives as ops.
        sharding: how the model is divided.
        points: live bytes at each point, without buffers.
        buffers: bytes of gathered parameters and buffers at each point.
        changed: by op: what is different, beside its bytes.
        wire: the clocks at the end of the step.
        gradient_bytes: that are there at the end.
    """
    moved_bytes = sharding.held_bytes() - sharding.parameter_bytes - sharding.state_bytes
    live = points + buffers + moved_bytes
    live[1::2] = live.reshape(-1, 2).max(axis=1)  # what a collective lets go of is still there at its entry
    ops = tuple(
        replace(
            op,
            entry_bytes=int(live[2 * op.index]),
            peak_bytes=int(live[2 * op.index + 1]),
            **changed.get(op.index, {}),  # type: ignore[arg-type]
        )
        for op in profile.ops
    )
    link, highest = sharding.link, int(live.argmax())
    ranks = ModelledRanks(
        kind=sharding.kind,
        ranks=sharding.ranks,
        units=len(sharding.units) if sharding.kind == "fsdp" else 0,
        state_bytes=sharding.held_bytes(),
        gradient_bytes=gradient_bytes,
        buffer_bytes=int(buffers.max()),
        peak_buffer_bytes=int(buffers[highest]),
        collective_ms=wire.collective_ms,
        waiting_ms=wire.waiting_ms,
        link=f"{link.name}, {link.bytes_per_ms / 1e6:.4g} GB/s each way, {link.latency_ms * 1000:.4g} us",
    )
    note = (
        f"one of {sharding.ranks} ranks ({sharding.kind}), modelled and not run: buffers and collectives are computed, "
        "and a plan for this profile cannot be applied"
    )
    return replace(
        profile,
        ops=ops,
        persistent_bytes=profile.persistent_bytes + moved_bytes,
        peak_bytes=int(live.max()),
        reserved_bytes=0,
        step_ms=wire.now_ms,
        notes=(*profile.notes, note),
        ranks=ranks,
    )


def _points(profile: Profile) -> numpy.ndarray:
    return numpy.array([size for op in profile.ops for size in (op.entry_bytes, op.peak_bytes)], dtype=numpy.int64)


# FSDP2 ------------------------------------------------------------------------------------------------------------


def _sharded(whole: Profile, sharding: Sharding) -> Profile:
    root, *others = sharding.units
    spans = unit_spans(whole, others)
    insertions = list(_fsdp_insertions(whole, spans))
    profile, slots = with_inserted(whole, [insertion for insertion, _, _ in insertions])
    at = {(what, unit): slot for slot, (_, what, unit) in zip(slots, insertions, strict=True)}
    order = [span.unit for span in spans]
    points, buffers = _points(profile), numpy.zeros(2 * len(profile.ops), dtype=numpy.int64)
    made = _made_by_unit(profile, root, order, at)
    for slot, unit, size_bytes in made:
        points[2 * slot + 2 :] -= size_bytes
        points[2 * slot + 2 :] += unit.reduced_bytes // sharding.ranks
    for first, end, size_bytes in _fsdp_buffers(profile, root, order, at):
        buffers[first:end] += size_bytes
    wire = _Wire()
    changed: dict[int, dict[str, object]] = {}
    for slot, time_ms in _fsdp_times(profile, sharding, order, at, wire):
        changed.setdefault(slot, {})["time_ms"] = time_ms
    for op in profile.ops[profile.forward_ops :]:
        changed.setdefault(op.index, {})["gradient_bytes"] = 0
    for slot, unit, _ in made:
        changed[slot]["gradient_bytes"] = unit.reduced_bytes // sharding.ranks
    gradient_bytes = sum(unit.reduced_bytes // sharding.ranks for _, unit, _ in made)
    result = _rebuilt(profile, sharding, points, buffers, changed, wire, gradient_bytes)
    gathered = {value: span for span in spans for value in span.parameters}
    return replace(
        result,
        values=tuple(
            replace(value, role="transient", label=f"{value.label} of {gathered[value.id].unit.name}")
            if value.id in gathered
            else value
            for value in result.values
        ),
        gathered=tuple(
            GatheredUnit(unit.name, span.parameters, ((at["again", unit] + 1, at["reduce", unit]),))
            for span, unit in zip(spans, order, strict=True)
            if span.parameters
        ),
    )


_Marked = tuple[Insertion, str, Unit | None]


def _fsdp_insertions(profile: Profile, spans: list[UnitSpan]) -> Iterator[_Marked]:
    """The collectives of a step in order, each with what it is and its unit (None: the root)."""

    def gather(before: int, unit: Unit | None, again: bool) -> _Marked:
        name = "" if unit is None else unit.name
        phase: Phase = "backward" if again else "forward"
        return Insertion(before, "pooch.all_gather", phase, _REFUSAL, name), "again" if again else "gather", unit

    def reduce(before: int, unit: Unit | None) -> _Marked:
        name = "" if unit is None else unit.name
        return Insertion(before, "pooch.reduce_scatter", "backward", _REFUSAL, name), "reduce", unit

    yield gather(profile.model_begin, None, again=False)
    for span in spans:
        yield gather(span.first, span.unit, again=False)
    for span in reversed(spans):
        yield gather(span.begin, span.unit, again=True)
        yield reduce(span.end, span.unit)
    yield reduce(len(profile.ops) - 1, None)


_Slots = dict[tuple[str, Unit | None], int]


def _made_by_unit(profile: Profile, root: Unit, order: list[Unit], at: _Slots) -> list[tuple[int, Unit, int]]:
    """Slot of the reduce-scatter, unit and bytes of the gradients that were made for it."""
    found, others_bytes = [], 0
    for unit in order:
        begin, end = at["again", unit], at["reduce", unit]
        made_bytes = sum(op.gradient_bytes for op in profile.ops[begin:end])
        found.append((end, unit, made_bytes))
        others_bytes += made_bytes
    all_bytes = sum(op.gradient_bytes for op in profile.ops)
    return [*found, (at["reduce", None], root, all_bytes - others_bytes)]


def _fsdp_buffers(profile: Profile, root: Unit, order: list[Unit], at: _Slots) -> Iterator[tuple[int, int, int]]:
    """First point, point after the last, and bytes of each buffer.

    A unit is gathered into a flat buffer, from which its parameters are copied. In the forward pass the buffer stays
    until the next unit has been gathered, that of the last one until the model returns. In the backward pass it goes
    after the copy, and that of the next unit comes: the root's beginning gathers the first one. Gradients are copied
    into another flat buffer, which stays until the next unit's gradients are ready.
    """
    end = 2 * len(profile.ops)
    last = 2 * max(profile.model_end, at["gather", order[-1] if order else None] + 1)
    forward: list[tuple[Unit, int]] = [(root, at["gather", None]), *((unit, at["gather", unit]) for unit in order)]
    reduce_root = 2 * at["reduce", None]
    yield 2 * forward[0][1] + 1, reduce_root + 1, root.gathered_bytes  # the root's parameters stay
    for (unit, slot), (following, next_slot) in pairwise(forward):
        # The body of the next gather holds both flat buffers, or the next one and its parameters: whichever is more.
        yield 2 * slot + 1, 2 * next_slot + 1, unit.gathered_bytes
        yield 2 * next_slot + 1, 2 * next_slot + 2, max(0, unit.gathered_bytes - following.gathered_bytes)
    yield 2 * forward[-1][1] + 1, last, forward[-1][0].gathered_bytes
    for number, unit in enumerate(order):
        slot = at["gather", unit]
        after = at["gather", order[number + 1]] if number + 1 < len(order) else profile.forward_ops
        leaves = min(after, _last_forward(profile, unit) + 1)
        yield 2 * slot + 1, 2 * leaves, unit.gathered_bytes
    prefetched_at = 2 * profile.forward_ops
    reduced: tuple[Unit, int] | None = None
    for number, unit in reversed(list(enumerate(order))):
        again, reduce = 2 * at["again", unit], 2 * at["reduce", unit]
        next_bytes = order[number - 1].gathered_bytes if number else 0
        yield prefetched_at, again + 1, unit.gathered_bytes  # flat
        yield again + 1, reduce + 1, unit.gathered_bytes  # its parameters
        yield again + 1, again + 2, max(unit.gathered_bytes, next_bytes) - next_bytes
        prefetched_at = again + 1
        if reduced is not None:
            yield reduced[1] + 1, reduce + 1, reduced[0].reduced_bytes
        reduced = unit, reduce
    if reduced is not None:
        yield reduced[1] + 1, reduce_root + 1, reduced[0].reduced_bytes
    yield reduce_root + 1, reduce_root + 2, root.reduced_bytes
    assert reduce_root + 2 <= end


def _last_forward(profile: Profile, unit: Unit) -> int:
    inside = (op.index for op in profile.ops[: profile.forward_ops] if f"{op.module}.".startswith(f"{unit.name}."))
    return max(inside)


def _fsdp_times(
    profile: Profile, sharding: Sharding, order: list[Unit], at: _Slots, wire: _Wire
) -> Iterator[tuple[int, float]]:
    """The slot of each collective and the time it takes of the step.

    A unit's collective starts when the unit before it begins to compute. Collectives run one after the other.
    """
    root, ranks, link = sharding.units[0], sharding.ranks, sharding.link
    what = {slot: key for key, slot in at.items()}
    ends: dict[tuple[str, str], float] = {}

    def start_gather(kind: str, unit: Unit) -> None:
        if unit.gathered_bytes:
            ends[kind, unit.name] = wire.start(link.gather_ms(unit.gathered_bytes, ranks))

    start_gather("gather", root)
    reducing_ms = 0.0
    for op in profile.ops:
        if op.index == profile.forward_ops and order:
            start_gather("again", order[-1])
        if op.index not in what:
            wire.now_ms += op.time_ms
            continue
        kind, found = what[op.index]
        unit = found or root
        if kind == "reduce":
            # It waits for the reduce-scatter before, and the last one for itself as well.
            time_ms = wire.wait(reducing_ms, sharding.copy_ms(unit.reduced_bytes))
            if unit.reduced_bytes:
                reducing_ms = wire.start(link.gather_ms(unit.reduced_bytes, ranks))
            yield op.index, time_ms + (wire.wait(reducing_ms, 0.0) if found is None else 0.0)
            continue
        yield op.index, wire.wait(ends.get((kind, unit.name), 0.0), sharding.copy_ms(unit.gathered_bytes))
        following = _following(kind, found, order)
        if following is not None:
            start_gather(kind, following)


def _following(kind: str, unit: Unit | None, order: list[Unit]) -> Unit | None:
    """The unit that is gathered next."""
    place = (-1 if unit is None else order.index(unit)) + (1 if kind == "gather" else -1)
    return order[place] if 0 <= place < len(order) else None


# DDP --------------------------------------------------------------------------------------------------------------


def _data_parallel(whole: Profile, sharding: Sharding) -> Profile:
    """Buckets as large as all gradients stay; each is reduced as soon as it is full, and the last op waits for all."""
    insertion = Insertion(len(whole.ops) - 1, "pooch.all_reduce", "backward", _REFUSAL)
    profile, [slot] = with_inserted(whole, [insertion])
    points = _points(profile)
    buffers = numpy.full(len(points), sharding.trained_bytes, dtype=numpy.int64)
    wire = _Wire()
    most, filled, end_ms = _FIRST_BUCKET_BYTES, 0, 0.0
    for op in profile.ops[:slot]:
        wire.now_ms += op.time_ms
        filled += op.gradient_bytes
        if filled >= most:
            end_ms = wire.start(sharding.link.all_reduce_ms(filled, sharding.ranks))
            most, filled = _BUCKET_BYTES, 0
    if filled:
        end_ms = wire.start(sharding.link.all_reduce_ms(filled, sharding.ranks))
    time_ms = wire.wait(end_ms, 2 * sharding.copy_ms(sharding.trained_bytes))
    changed: dict[int, dict[str, object]] = {slot: {"time_ms": time_ms}}
    return _rebuilt(profile, sharding, points, buffers, changed, wire, sharding.trained_bytes)
