"""A profile as its step runs with hooks attached: each forward op of the region takes what they take besides."""

from __future__ import annotations

from dataclasses import replace

from pooch.ir import Profile, Region
from pooch.ir.dataflow import Dataflow


def dataflow_of(profile: Profile, region: Region, *, hooked: bool) -> Dataflow:
    """What planner and simulator see of a profile.

    Args:
        hooked: something leaves or is made again, so that hooks are attached; a plan that keeps all attaches none.
    """
    plain = Dataflow(profile, region)
    if not hooked or profile.hooks.op_ms == 0:
        return plain
    under_hooks = set(plain.forward_slots)
    ops = tuple(
        replace(op, time_ms=op.time_ms + profile.hooks.op_ms) if op.index in under_hooks else op for op in profile.ops
    )
    return Dataflow(replace(profile, ops=ops), region)
