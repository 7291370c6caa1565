"""A profile as its step runs with hooks attached: each forward op of the region takes what they take besides."""

from __future__ import annotations

from dataclasses import replace

from pooch.ir import Profile, Region
from pooch.ir.dataflow import Dataflow


def under_hooks(profile: Profile, region: Region) -> Dataflow:
    """What planner and simulator see of a profile where something leaves or is made again."""
    plain = Dataflow(profile, region)
    if profile.hooks.op_ms == 0:
        return plain
    hooked = set(plain.forward_slots)
    ops = tuple(
        replace(op, time_ms=op.time_ms + profile.hooks.op_ms) if op.index in hooked else op for op in profile.ops
    )
    return Dataflow(replace(profile, ops=ops), region)
