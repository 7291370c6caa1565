"""Profiles of other hardware and other batch sizes from a recorded one, for tests. They are marked as modelled."""

from __future__ import annotations

from dataclasses import replace

import numpy

from pooch.api.hooked import dataflow_of
from pooch.ground.units import format_bytes
from pooch.ir import HookCosts, Link, Profile, Value


def rescale(
    profile: Profile, batch_factor: float, compute_factor: float, link: Link, memory_bytes: int, device_name: str
) -> Profile:
    """Model the step with another batch size, on a faster or slower device with another link and memory.

    Args:
        profile: the measured profile.
        batch_factor: factor for the bytes of what the step makes and for its times. Parameters, their gradients and
            everything else that lived before the step do not change (nor do inputs, which are small).
        compute_factor: factor for the speed of every op, whether bound by memory or by arithmetic.
        link: of the other hardware.
        memory_bytes: of the other device.
        device_name: of the other device.

    Returns:
        A profile whose device is marked as modelled, with a note on how it was made. It includes no hook costs, since
        those of the other hardware's host are not known.
    """
    time_factor = batch_factor / compute_factor
    points = _scaled_points(profile, batch_factor)
    hooked_bytes = [round(op.hooked_bytes * batch_factor) for op in profile.ops]
    ops = tuple(
        replace(
            op,
            time_ms=op.time_ms * time_factor,
            host_ms=0.0,
            entry_bytes=points[2 * slot],
            peak_bytes=max(points[2 * slot], points[2 * slot + 1] - hooked_bytes[slot]),
            hooked_bytes=hooked_bytes[slot],
        )
        for slot, op in enumerate(profile.ops)
    )
    note = (
        f"modelled: batch x {batch_factor:g}, every op {compute_factor:g} times as fast, "
        f"{format_bytes(link.out_bytes_per_ms * 1000)}/s to the tier"
    )
    return replace(
        profile,
        device=replace(profile.device, name=device_name, memory_bytes=memory_bytes, modelled=True),
        link=link,
        ops=ops,
        values=tuple(_scaled_value(value, batch_factor) for value in profile.values),
        step_ms=profile.step_ms * time_factor,
        peak_bytes=max(op.peak_bytes for op in ops),
        reserved_bytes=0,
        batch_size=round(profile.batch_size * batch_factor),
        hooks=HookCosts(),
        split=None,
        notes=(*profile.notes, note),
    )


def _scaled_points(profile: Profile, batch_factor: float) -> list[int]:
    """Live bytes at each point under hooks, where parameters and their gradients do not change.

    Gradients are taken to be what is live besides activations and at no later point less.
    """
    dataflow = dataflow_of(profile, "step", hooked=True)
    others = dataflow.base_points
    staying = numpy.minimum.accumulate(others[::-1])[::-1].clip(min=profile.persistent_bytes)
    return [int(n) for n in numpy.rint(staying + (dataflow.in_core_points - staying) * batch_factor)]


def _scaled_value(value: Value, batch_factor: float) -> Value:
    if value.role != "made":
        return value
    size_bytes = round(value.size_bytes * batch_factor)
    return replace(value, size_bytes=size_bytes, allocated_bytes=round(value.allocated_bytes * batch_factor))
