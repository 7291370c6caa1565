"""A profile as its step runs with hooks attached, which cost the host time for each forward op of the region."""

from __future__ import annotations

from dataclasses import replace

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Op, Profile, Region


def dataflow_of(profile: Profile, region: Region, *, hooked: bool) -> Dataflow:
    """What planner and simulator see of a profile.

    Args:
        profile: the measured step.
        region: that is planned.
        hooked: whether hooks are attached; a plan that keeps everything attaches none.
    """
    plain = Dataflow(profile, region)
    if not hooked or profile.hooks.op_ms == 0:
        return plain
    under_hooks = set(plain.forward_slots)
    ops = tuple(_hooked(op, profile) if op.index in under_hooks else op for op in profile.ops)
    return Dataflow(replace(profile, ops=ops), region)


def _hooked(op: Op, profile: Profile) -> Op:
    """Hooks take host time before each op, which is compute time if the host computes."""
    if profile.device.has_streams:
        return replace(op, host_ms=op.host_ms + profile.hooks.op_ms)
    return replace(op, time_ms=op.time_ms + profile.hooks.op_ms)
