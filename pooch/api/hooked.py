"""A profile as its step runs with hooks attached, which cost host time, and for some ops memory."""

from __future__ import annotations

from dataclasses import replace

from ..analysis.dataflow import Dataflow
from ..ir import Op, Profile, Region

# An op that moves so many bytes leaves little in the caches and in the table of addresses of what comes after it. Hooks
# take longer in proportion below: on an AMD EPYC 2.5 us an op between tensors of 16 KiB, 14 us of 256 KiB, and 23 us of
# 1 MiB.
COLD_BYTES = 2**20


def dataflow_of(profile: Profile, region: Region, *, hooked: bool) -> Dataflow:
    """What planner and simulator see of a profile.

    Args:
        profile: the measured step.
        region: that is planned.
        hooked: whether hooks are attached; a plan that keeps everything attaches none.
    """
    plain = Dataflow(profile, region)
    under_hooks = set(plain.forward_slots) if hooked else set()
    hooks = profile.hooks
    are_free = hooks.op_ms == hooks.cold_op_ms == hooks.view_ms == hooks.step_ms == 0
    if are_free and not any(_raised_bytes(profile.ops[slot], profile) for slot in under_hooks):
        return plain
    ops = [_hooked(op, profile) if op.index in under_hooks else op for op in profile.ops]
    if under_hooks:  # what each step takes once comes with its closing op, which no plan replays
        ops[-1] = replace(ops[-1], time_ms=ops[-1].time_ms + hooks.step_ms)
    return Dataflow(replace(profile, ops=tuple(ops)), region)


def _hooked(op: Op, profile: Profile) -> Op:
    """Hooks take host time before each op and view, which is compute time if the host computes.

    A replay of the op passes no views, but makes its arguments again, which takes about as long.
    """
    moved_bytes = sum(profile.values[each].size_bytes for each in (*op.reads, *op.writes))
    cold = min(1.0, moved_bytes / COLD_BYTES)
    hook_ms = profile.hooks.op_ms + cold * profile.hooks.cold_op_ms + op.views * profile.hooks.view_ms
    op = replace(op, peak_bytes=op.peak_bytes + _raised_bytes(op, profile))
    if profile.device.has_streams:
        return replace(op, host_ms=op.host_ms + hook_ms)
    return replace(op, time_ms=op.time_ms + hook_ms)


def _raised_bytes(op: Op, profile: Profile) -> int:
    return 0 if profile.hooks.adds_in_place else op.hooked_bytes
