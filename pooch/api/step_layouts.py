"""Schedule -> the arena of its step."""

from __future__ import annotations

from ..analysis.dataflow import Dataflow
from ..ir import Plan, Profile, Schedule
from ..ir.layout import Layout, PlacedBlock, StepLayout
from ..packing import pack, verify
from ..simulator import BlockMaker, StepBlocks
from .hooked import dataflow_of
from .simulation import simulate, simulate_in_core

NOTHING = Schedule((), (), (), (), (), 0)


def layout_of(
    profile: Profile, plan: Plan | None = None, *, policy: str = "ours", time_limit_s: float = 10.0
) -> StepLayout:
    """Pack the step of a plan.

    Args:
        profile: that the plan was made for.
        plan: whose step is packed; None: the step as it was profiled.
        policy: of packing, such as "ours".
        time_limit_s: CPU seconds that "ours" searches for, unless it reaches the bound before.

    Raises:
        UsageError: there is no such policy.
        PlanMismatch: the plan was made for another profile.
        InvalidSchedule: the plan's schedule cannot be executed.
    """
    if plan is not None:
        simulate(profile, plan)  # refuses what does not belong together
    found = _blocks_of(profile, plan)
    layout = pack(found.blocks, policy=policy, time_limit_s=time_limit_s)
    verify(found.blocks, layout)
    return placed(found, layout)


def _blocks_of(profile: Profile, plan: Plan | None) -> StepBlocks:
    if plan is None:
        return BlockMaker(Dataflow(profile)).blocks(NOTHING)
    dataflow = dataflow_of(profile.variant(plan.splits), plan.region, hooked=bool(plan.schedule.actions))
    return BlockMaker(dataflow).blocks(plan.schedule)


def tick_times_ms(profile: Profile, plan: Plan | None = None) -> list[float]:
    """When each tick of a step begins, and when the last one ends: the ticks in which the blocks of a layout live.

    The ticks of an entry share the time between the op before it and its own op.

    Args:
        profile: the measured step.
        plan: whose layout it is; None: that of the step as it was profiled.
    """
    timeline = simulate_in_core(profile) if plan is None else simulate(profile, plan)
    ends_ms = {each.target: each.end_ms for each in timeline.intervals if each.kind == "op"}
    times_ms: list[float] = []
    entries = _blocks_of(profile, plan).point_ticks[0::2]
    for slot, (first, end) in enumerate(entries):
        begin_ms, until_ms = ends_ms.get(slot - 1, 0.0), float(timeline.slot_start_ms[slot])
        times_ms += [begin_ms + (until_ms - begin_ms) * place / (end - first) for place in range(end - first)]
        times_ms.append(until_ms)
    return [*times_ms, timeline.step_ms]


def placed(found: StepBlocks, layout: Layout) -> StepLayout:
    """Join blocks and offsets into what is saved with a plan."""
    blocks = tuple(
        PlacedBlock(
            item.kind, item.target, item.block.lower, item.block.upper, item.block.size_bytes,
            item.block.alignment_bytes, offset,
        )
        for item, offset in zip(found.items, layout.offsets, strict=True)
    )  # fmt: skip
    return StepLayout(layout.policy, found.outside_bytes, layout.arena_bytes, layout.bound_bytes, blocks)
