"""Schedule -> the arena of its step."""

from __future__ import annotations

from ..analysis.dataflow import Dataflow
from ..ir import Plan, Profile, Schedule
from ..ir.layout import Layout, PlacedBlock, StepLayout
from ..packing import pack, verify
from ..simulator import BlockMaker, StepBlocks
from .hooked import dataflow_of
from .simulation import simulate


def layout_of(profile: Profile, plan: Plan, *, policy: str = "ours", time_limit_s: float = 10.0) -> StepLayout:
    """Pack the step of a plan.

    Args:
        profile: that the plan was made for.
        plan: whose step is packed.
        policy: of packing, such as "ours".
        time_limit_s: CPU seconds that "ours" searches for, unless it reaches the bound before.

    Raises:
        UsageError: there is no such policy.
        PlanMismatch: the plan was made for another profile.
        InvalidSchedule: the plan's schedule cannot be executed.
    """
    simulate(profile, plan)  # refuses what does not belong together
    dataflow = dataflow_of(profile, plan.region, hooked=bool(plan.schedule.actions))
    found = BlockMaker(dataflow).blocks(plan.schedule)
    return placed(found, verified(found, pack(found.blocks, policy=policy, time_limit_s=time_limit_s)))


def in_core_layout(profile: Profile, *, policy: str = "ours", time_limit_s: float = 10.0) -> StepLayout:
    """Pack the step as it was profiled."""
    found = BlockMaker(Dataflow(profile)).blocks(Schedule((), (), (), (), (), 0))
    return placed(found, verified(found, pack(found.blocks, policy=policy, time_limit_s=time_limit_s)))


def verified(found: StepBlocks, layout: Layout) -> Layout:
    """Return a layout once the verifier has passed it.

    Raises:
        InvalidLayout: blocks overlap.
    """
    verify(found.blocks, layout)
    return layout


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
