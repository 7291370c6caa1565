"""Checks of a profile beyond its types: ids are positions, references are valid both ways, numbers are sane.

After these checks, no code has to guard indexes, and no chain of references is a cycle. The checks of a plan are in
`executable.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..ground.units import MOST_BYTES, MOST_RANKS, format_ms
from .files import fault_of
from .profile import Op, Profile, Value
from .split import Split

MOST_MS = 1e12
MOST_SUM_BYTES = 1 << 62


@fault_of.register
def check_profile(profile: Profile) -> str | None:
    """The first inconsistency of a profile, or None."""
    return next(_profile_faults(profile), None)


def is_time(time_ms: float) -> bool:
    """Whether a number is a valid duration in ms."""
    return math.isfinite(time_ms) and 0 <= time_ms <= MOST_MS


def are_bytes(*numbers: int) -> bool:
    """Whether all of these are valid numbers of bytes."""
    return all(0 <= number < MOST_BYTES for number in numbers)


def anchor_faults(anchors: Iterable[tuple[int, tuple[int, ...]]], first: int, last: int) -> Iterator[str]:
    """Anchors ascend, lie in `range(first, last)`, and name each value once."""
    slots = [slot for slot, _ in anchors]
    if any(later <= earlier for earlier, later in pairwise(slots)):
        yield "its anchors are not in ascending order"
    if any(not first <= slot < last for slot in slots):
        yield "an anchor is outside the backward pass"
    unpacked = [value for _, ids in anchors for value in ids]
    if len(set(unpacked)) != len(unpacked):
        yield "a value is first unpacked at two anchors"


def _profile_faults(profile: Profile) -> Iterator[str]:
    yield from _frame_faults(profile)
    yield from _split_faults(profile)
    yield from _cost_faults(profile)
    for position, op in enumerate(profile.ops):
        yield from _op_faults(profile, position, op)
    for position, value in enumerate(profile.values):
        yield from _value_faults(profile, position, value)
    for op in profile.ops:
        yield from _flow_faults(profile, op)
    for value in profile.values:
        yield from _history_faults(profile, value)
    yield from _sum_faults(profile)
    yield from anchor_faults(profile.anchors, profile.forward_ops, len(profile.ops))
    yield from _unpack_faults(profile)
    yield from _gathered_faults(profile)
    yield from _persistent_faults(profile)


def _frame_faults(profile: Profile) -> Iterator[str]:
    if not profile.ops:
        yield "it has no ops"
    if not 0 <= profile.forward_ops < len(profile.ops):
        yield f"forward_ops is {profile.forward_ops} of {len(profile.ops)} ops"
    if not 0 <= profile.model_begin <= profile.model_end <= profile.forward_ops:
        yield f"the model's ops {profile.model_begin} to {profile.model_end} are not within the forward pass"
    sizes = (profile.peak_bytes, profile.persistent_bytes, profile.reserved_bytes, profile.device.memory_bytes)
    if not are_bytes(*sizes):
        yield "peak_bytes, persistent_bytes, reserved_bytes or memory_bytes is negative or too large"
    in_flight = profile.in_flight
    if in_flight.microbatches < 1 or not are_bytes(in_flight.resident_bytes, in_flight.gradient_bytes):
        yield f"{in_flight.microbatches} microbatches are in flight, or their bytes are negative or too large"
    each_bytes = sum(value.allocated_bytes for value in profile.values) + profile.peak_bytes
    if in_flight.microbatches > 1 and in_flight.microbatches * each_bytes >= MOST_BYTES:
        yield f"{in_flight.microbatches} microbatches in flight are beyond all memory"
    if not 0 <= profile.batch_size < MOST_BYTES:
        yield f"the batch size is {profile.batch_size}"


def _cost_faults(profile: Profile) -> Iterator[str]:
    link, hooks = profile.link, profile.hooks
    rates = (link.out_bytes_per_ms, link.in_bytes_per_ms)
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        yield f"a transfer rate of the link is not positive and finite: {rates}"
    packed_rates = (link.packed_out_bytes_per_ms, link.packed_in_bytes_per_ms)
    if not all(math.isfinite(rate) and rate >= 0 for rate in packed_rates):
        yield f"a transfer rate of masks is negative or not finite: {packed_rates}"
    if not (is_time(link.out_latency_ms) and is_time(link.in_latency_ms)):
        yield f"the link's latencies are {link.out_latency_ms} and {link.in_latency_ms} ms"
    shares = (link.out_compute_share, link.in_compute_share)
    if not all(is_time(share) for share in shares):
        yield f"copies take shares {shares} of compute"
    if not 1 <= link.ranks <= MOST_RANKS:
        yield f"{link.ranks} ranks share the link"
    costs_ms = (hooks.op_ms, hooks.replay_ms, hooks.copy_ms, hooks.view_ms, hooks.step_ms, hooks.cold_op_ms)
    if not all(map(is_time, costs_ms)):
        yield f"the hooks cost {costs_ms}"
    if not is_time(profile.step_ms):
        yield f"step_ms is {profile.step_ms}"
    if not (math.isfinite(profile.time_factor) and profile.time_factor >= 0):
        yield f"time_factor is {profile.time_factor}"


def split_faults(splits: Iterable[Split]) -> Iterator[str]:
    """Numbers of calls that run in slices are sane."""
    for split in splits:
        if not are_bytes(split.input_bytes, split.whole_peak_bytes, split.peak_bytes):
            yield f"the split of {split.label} has a size that is negative or too large"
        if not (is_time(split.whole_ms) and is_time(split.time_ms)) or min(split.op, split.rows, split.slices) < 0:
            yield f"the split of {split.label} has a time or a number that is not one"


def _split_faults(profile: Profile) -> Iterator[str]:
    yield from split_faults(profile.splits)
    if any(split.op >= profile.forward_ops for split in profile.splits):
        yield "a split names an op that does not exist"
    if profile.split is not None:
        if profile.splits or profile.split.split is not None or not profile.split.splits:
            yield "the step in slices is not one, or has slices of its own"
        fault = check_profile(profile.split)
        if fault is not None:
            yield f"the step in slices: {fault}"


def _op_faults(profile: Profile, position: int, op: Op) -> Iterator[str]:
    if op.index != position:
        yield f"op {position} has index {op.index}"
    if (op.phase == "forward") != (position < profile.forward_ops):
        yield f"op {position} is marked {op.phase}, but the backward pass begins at {profile.forward_ops}"
    if not (is_time(op.time_ms) and is_time(op.host_ms)):
        yield f"op {position} has the times {op.time_ms} and {op.host_ms}"
    if not (
        are_bytes(op.entry_bytes, op.peak_bytes, op.hooked_bytes, op.gradient_bytes) and op.entry_bytes <= op.peak_bytes
    ):
        yield (
            f"op {position} has {op.entry_bytes} bytes at its entry and a peak of {op.peak_bytes}, and "
            f"{op.hooked_bytes} more under hooks"
        )
    if op.views < 0:
        yield f"op {position} comes after {op.views} views"
    if any(not 0 <= value < len(profile.values) for value in (*op.reads, *op.writes)):
        yield f"op {position} names a value that does not exist"
    if op.phase == "backward" and (op.reads or op.writes):
        yield f"op {position} of the backward pass lists what it reads or writes"


def _value_faults(profile: Profile, position: int, value: Value) -> Iterator[str]:
    end = len(profile.ops)
    if value.id != position:
        yield f"value {position} has id {value.id}"
    if value.size_bytes < 0 or value.allocated_bytes < 0:
        yield f"value {position} has a negative size"
    if not are_bytes(value.size_bytes, value.allocated_bytes):
        yield f"value {position} is too large: {max(value.size_bytes, value.allocated_bytes)} bytes"
    if not -1 <= value.producer < profile.forward_ops or not -1 <= value.overwritten_at < end:
        yield f"value {position} names an op that does not exist"
    if not -1 <= value.overwrites < position:
        yield f"value {position} overwrites value {value.overwrites}, which was not there before it"
    if max(value.release, value.first_unpack, value.death) > end:
        yield f"value {position} lives beyond the end of the step"
    if any(not 0 <= slot < profile.forward_ops for slot in value.touches or ()):
        yield f"value {position} is touched outside the forward pass"
    if value.fixed is None and not 0 <= value.producer <= value.death:
        yield f"activation {position} dies before it is made"
    if min(value.release, value.death) < value.producer:
        yield f"value {position} is released before it is made"


def _flow_faults(profile: Profile, op: Op) -> Iterator[str]:
    """Reads and writes of an op agree with its values."""
    values = profile.values
    for read in op.reads:
        if values[read].producer >= op.index:
            yield f"op {op.index} reads value {read} before it is made"
        if 0 <= values[read].overwritten_at < op.index:
            yield f"op {op.index} reads value {read} after it was overwritten"
    if len(set(op.writes)) != len(op.writes):
        yield f"op {op.index} writes a value twice"
    for written in op.writes:
        if values[written].producer != op.index:
            yield f"op {op.index} writes value {written}, whose producer is op {values[written].producer}"


def _history_faults(profile: Profile, value: Value) -> Iterator[str]:
    """Values agree with their producers and with what they overwrite; activations are saved for the backward pass."""
    if value.producer >= 0 and value.id not in profile.ops[value.producer].writes:
        yield f"value {value.id} is not written by its producer, op {value.producer}"
    if value.role == "made" and value.producer < 0:
        yield f"value {value.id} is made, but by no op"
    if value.overwrites >= 0 and profile.values[value.overwrites].overwritten_at != value.producer:
        yield f"value {value.id} overwrites value {value.overwrites}, which op {value.producer} does not overwrite"
    if 0 <= value.overwritten_at <= value.producer:
        yield f"value {value.id} is overwritten before it is made"
    if any(slot < value.producer for slot in value.touches or ()):
        yield f"value {value.id} is touched before it is made"
    if value.fixed is None and not (value.role == "made" and value.saved):
        yield f"value {value.id} is an activation that no op made or autograd does not save"


def _sum_faults(profile: Profile) -> Iterator[str]:
    peak = max(op.peak_bytes for op in profile.ops)
    if profile.peak_bytes != peak:
        yield f"peak_bytes is {profile.peak_bytes}, and the highest peak of an op {peak}"
    if sum(value.size_bytes + value.allocated_bytes for value in profile.values) >= MOST_SUM_BYTES:
        yield "its values are too large together"
    all_bytes = sum(value.size_bytes for value in profile.values)
    copied_ms = profile.link.out_ms(all_bytes) + profile.link.in_ms(all_bytes)
    if not is_time(copied_ms):
        yield f"the link would take {format_ms(copied_ms)} for its values, which no step does"


def _unpack_faults(profile: Profile) -> Iterator[str]:
    """Anchors and first unpacks agree."""
    values = profile.values
    slots = {value: slot for slot, ids in profile.anchors for value in ids}
    if any(not 0 <= value < len(values) for value in slots):
        yield "an anchor names a value that does not exist"
    for value in values:
        expected = value.first_unpack if value.role == "made" else -1
        if slots.get(value.id, -1) != max(-1, expected):
            yield f"value {value.id} is first unpacked in slot {expected}, and its anchor is {slots.get(value.id, -1)}"
        if value.first_unpack > value.death:
            yield f"value {value.id} is unpacked in slot {value.first_unpack}, after its death"


def _gathered_faults(profile: Profile) -> Iterator[str]:
    """Each gathered parameter belongs to one unit, and windows are stretches of the backward pass, in order."""
    values = profile.values
    gathered = [value for unit in profile.gathered for value in unit.values]
    if len(set(gathered)) != len(gathered):
        yield "a gathered parameter belongs to two units"
    for value in gathered:
        if not 0 <= value < len(values) or values[value].role != "transient":
            yield f"value {value} of a unit is not gathered in the step"
    for unit in profile.gathered:
        slots = [slot for window in unit.windows for slot in window]
        if any(not profile.forward_ops <= slot < len(profile.ops) for slot in slots):
            yield f"a window of unit {unit.name!r} is outside the backward pass"
        if any(first > last for first, last in unit.windows):
            yield f"a window of unit {unit.name!r} ends before it begins"
        if any(before[1] >= after[0] for before, after in pairwise(unit.windows)):
            yield f"the windows of unit {unit.name!r} are not in ascending order"


def _persistent_faults(profile: Profile) -> Iterator[str]:
    """What outlives the step is named once, is used in the step, and is there in the bytes of the ops."""
    end = len(profile.ops)
    if len({(each.name, each.kind) for each in profile.persistent}) != len(profile.persistent):
        yield "a tensor that outlives the step is listed twice"
    always_bytes = 0
    for each in profile.persistent:
        if not are_bytes(each.size_bytes, each.allocated_bytes):
            yield f"the {each.kind} of {each.name!r} has a size that is negative or too large"
        if any(later <= earlier for earlier, later in pairwise(each.uses)) or not all(
            0 <= use < end for use in each.uses
        ):
            yield f"the {each.kind} of {each.name!r} is used in slots that do not exist, or not in order"
        if each.kind == "gradient" and not (each.uses and each.uses[0] >= profile.forward_ops):
            yield f"the gradient of {each.name!r} is not made in the backward pass"
        if each.kind in ("gradient", "state") and not each.is_stepped:
            yield f"the {each.kind} of {each.name!r} is of no step of an optimizer"
        always_bytes += each.allocated_bytes if each.kind != "gradient" else 0
    if always_bytes > profile.persistent_bytes:
        yield "what outlives the step and could leave is more than all that outlives it"
    made_bytes = {each.uses[0]: 0 for each in profile.persistent if each.kind == "gradient" and each.uses}
    for each in profile.persistent:
        if each.kind == "gradient" and each.uses:
            made_bytes[each.uses[0]] += each.allocated_bytes
    there_bytes = always_bytes
    for op in profile.ops:
        entry_bytes, there_bytes = there_bytes, there_bytes + made_bytes.get(op.index, 0)
        if op.entry_bytes < entry_bytes or op.peak_bytes < there_bytes:
            yield f"op {op.index} has fewer bytes than what outlives the step and is there"
            return
