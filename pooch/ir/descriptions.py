"""Profiles, plans, schedules and timelines in one short line, however large they are: their `repr`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..units import format_bytes, format_ms, plural
from ..visible import one_line

if TYPE_CHECKING:
    from .plan import Plan
    from .profile import Profile
    from .schedule import Schedule
    from .timeline import Timeline

_LONGEST_NAME = 20
_LONGEST_POLICY = 16


def describe_profile(profile: Profile) -> str:
    """As in `Profile(resnet50, batch 16, cpu: 1.51 GiB peak, 12.8 s, 106 activations)`."""
    device = profile.device
    place = f"{one_line(device.name, _LONGEST_NAME)}, modelled" if device.modelled else device.kind
    batch = f"batch {profile.batch_size}, " if profile.batch_size else ""
    figures = f"{format_bytes(profile.peak_bytes)} peak, {format_ms(profile.step_ms)}"
    return f"Profile({_name(profile.workload)}, {batch}{place}: {figures}, {plural(_decided(profile), 'activation')})"


def _decided(profile: Profile) -> int:
    return sum(value.fixed is None for value in profile.values)


def describe_plan(plan: Plan) -> str:
    """As in `Plan(resnet50 by ilp: 928.19 MiB of 929.93 MiB, 1.082x, keep 60, swap 30, recompute 16)`."""
    budget = f" of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    slowdown = f", {plan.predicted_step_ms / plan.in_core_step_ms:.3f}x" if plan.in_core_step_ms else ""
    counts = Counter(each.choice for each in plan.choices)
    choices = ", ".join(f"{choice} {counts[choice]:,}" for choice in ("keep", "swap", "recompute"))
    who = f"{_name(plan.workload)} by {one_line(plan.policy, _LONGEST_POLICY)}"
    return f"Plan({who}: {format_bytes(plan.predicted_peak_bytes)}{budget}{slowdown}, {choices})"


def describe_schedule(schedule: Schedule) -> str:
    """As in `Schedule(92 actions, 30 swapped, 16 recomputed, 500.00 MiB in the tier)`."""
    moved = f"{len(schedule.swapped):,} swapped, {len(schedule.recomputed):,} recomputed"
    return (
        f"Schedule({plural(len(schedule.actions), 'action')}, {moved}, {format_bytes(schedule.host_bytes)} in the tier)"
    )


def describe_timeline(timeline: Timeline) -> str:
    """As in `Timeline(13.9 s, of it 0.2 s stalled and 0.9 s replaying: 928.19 MiB peak, 500.00 MiB in the tier)`."""
    parts = {"stalled": timeline.stall_ms, "replaying": timeline.replay_ms}
    spent = " and ".join(f"{format_ms(part_ms)} {what}" for what, part_ms in parts.items() if part_ms > 0)
    tier = f", {format_bytes(timeline.host_bytes)} in the tier" if timeline.host_bytes else ""
    of_it = f", of it {spent}" if spent else ""
    return f"Timeline({format_ms(timeline.step_ms)}{of_it}: {format_bytes(timeline.peak_bytes)} peak{tier})"


def _name(workload: str) -> str:
    return one_line(workload, _LONGEST_NAME) or "a step"
