"""What types cannot say about a profile or a plan: ids are positions, references lead somewhere, rows are sorted.

Each check gives the first fault as text, or None. Whoever reads the data after these checks need not guard indexes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from pooch.ir.plan import Plan
from pooch.ir.profile import Op, Profile, Value


def check_profile(profile: Profile) -> str | None:
    """The first inconsistency of a profile, or None."""
    return next(_profile_faults(profile), None)


def check_plan(plan: Plan) -> str | None:
    """The first inconsistency of a plan, or None."""
    return next(_plan_faults(plan), None)


def _profile_faults(profile: Profile) -> Iterator[str]:
    yield from _frame_faults(profile)
    for position, op in enumerate(profile.ops):
        yield from _op_faults(profile, position, op)
    for position, value in enumerate(profile.values):
        yield from _value_faults(profile, position, value)
    first, last = profile.forward_ops, len(profile.ops)
    yield from _anchor_faults(profile.anchors, first, last)
    named = [value for _, ids in profile.anchors for value in ids]
    if any(not 0 <= value < len(profile.values) for value in named):
        yield "an anchor names a value that does not exist"


def _frame_faults(profile: Profile) -> Iterator[str]:
    if not profile.ops:
        yield "it has no ops"
    if not 0 <= profile.forward_ops <= len(profile.ops):
        yield f"forward_ops is {profile.forward_ops} of {len(profile.ops)} ops"
    if not 0 <= profile.model_begin <= profile.model_end <= profile.forward_ops:
        yield f"the model's ops {profile.model_begin} to {profile.model_end} are not within the forward pass"
    link = profile.link
    if not (link.out_bytes_per_ms > 0 and link.in_bytes_per_ms > 0):
        yield "a transfer rate of the link is not positive"
    if link.ranks < 1:
        yield f"{link.ranks} ranks share the link"
    costs_ms = (profile.hooks.op_ms, profile.hooks.replay_ms, profile.hooks.copy_ms)
    if not all(math.isfinite(cost_ms) and cost_ms >= 0 for cost_ms in costs_ms):
        yield f"the hooks cost {costs_ms}"
    if not (math.isfinite(profile.step_ms) and profile.step_ms >= 0):
        yield f"step_ms is {profile.step_ms}"
    if profile.peak_bytes < 0 or profile.persistent_bytes < 0:
        yield "peak_bytes or persistent_bytes is negative"


def _op_faults(profile: Profile, position: int, op: Op) -> Iterator[str]:
    if op.index != position:
        yield f"op {position} has index {op.index}"
    if (op.phase == "forward") != (position < profile.forward_ops):
        yield f"op {position} is marked {op.phase}, but the backward pass begins at {profile.forward_ops}"
    if not (math.isfinite(op.time_ms) and op.time_ms >= 0):
        yield f"op {position} has the time {op.time_ms}"
    if not 0 <= op.entry_bytes <= op.peak_bytes:
        yield f"op {position} has {op.entry_bytes} bytes at its entry and a peak of {op.peak_bytes}"
    if any(not 0 <= value < len(profile.values) for value in (*op.reads, *op.writes)):
        yield f"op {position} names a value that does not exist"


def _value_faults(profile: Profile, position: int, value: Value) -> Iterator[str]:
    end = len(profile.ops)
    if value.id != position:
        yield f"value {position} has id {value.id}"
    if value.size_bytes < 0 or value.allocated_bytes < 0:
        yield f"value {position} has a negative size"
    if not -1 <= value.producer < profile.forward_ops or not -1 <= value.overwritten_at < end:
        yield f"value {position} names an op that does not exist"
    if not -1 <= value.overwrites < len(profile.values):
        yield f"value {position} overwrites a value that does not exist"
    if max(value.release, value.first_unpack, value.death) > end:
        yield f"value {position} lives beyond the end of the step"
    if any(not 0 <= slot < profile.forward_ops for slot in value.touches or ()):
        yield f"value {position} is touched outside of the forward pass"
    if value.fixed is None and not 0 <= value.producer <= value.death:
        yield f"activation {position} dies before it is made"


def _anchor_faults(anchors: Iterable[tuple[int, tuple[int, ...]]], first: int, last: int) -> Iterator[str]:
    slots = [slot for slot, _ in anchors]
    if any(later <= earlier for earlier, later in pairwise(slots)):
        yield "its anchors are not in ascending order"
    if any(not first <= slot < last for slot in slots):
        yield "an anchor stands outside of the backward pass"


def _plan_faults(plan: Plan) -> Iterator[str]:
    values = [decision.value for decision in plan.choices]
    if len(set(values)) != len(values):
        yield "an activation is decided on twice"
    if any(value < 0 for value in values):
        yield "a decision names a negative value"
    slots = [action.slot for action in plan.schedule.actions]
    if any(later < earlier for earlier, later in pairwise(slots)):
        yield "its actions are not in ascending order of slots"
    if any(action.target < 0 for action in plan.schedule.actions):
        yield "an action names a negative target"
    yield from _anchor_faults(plan.anchors, 0, 2**63)
    yield from _tier_faults(plan)


def _tier_faults(plan: Plan) -> Iterator[str]:
    swapped = set(plan.schedule.swapped)
    if {value for value, _ in plan.schedule.host_offsets} != swapped:
        yield "the tier's layout is not that of the swapped values"
    if any(not 0 <= offset <= plan.schedule.host_bytes for _, offset in plan.schedule.host_offsets):
        yield "a swapped value lies outside of the tier"
