"""Profile + Plan -> the memory of its step, block by block."""

from __future__ import annotations

from ..ground.errors import UsageError
from ..ir import Plan, Profile
from ..ir.layout import OF_VALUES, PlacedBlock
from ..ir.lives import Life, StepLives
from .step_layouts import layout_of, tick_times_ms

DECIDED = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}
_OTHERS = {
    "fixed": "not decided on",
    "replay": "made by a replay",
    "before": "from before the step",
    "program": "held by the program",
    "gradient": "gradient",
    "temporary": "temporary",
}


def lives_of(profile: Profile, plan: Plan) -> StepLives:
    """Predict the memory of the step of a plan.

    The highest sum of live bytes is the plan's predicted peak, to the byte.

    Args:
        profile: that the plan was made for.
        plan: the plan.

    Raises:
        PlanMismatch: the plan was made for another profile.
        UsageError: the plan is for several microbatches in flight.
    """
    if plan.microbatches_in_flight > 1:
        raise UsageError("the memory of several microbatches in flight is not drawn: plan one microbatch")
    layout = plan.layout or layout_of(profile, plan, policy="ours", time_limit_s=1.0)
    times_us = [round(1000 * each) for each in tick_times_ms(profile, plan)]
    last = max((block.upper for block in layout.blocks), default=0)
    variant = profile.variant(plan.splits)
    reasons = reasons_of(plan)
    lives = tuple(_life(block, variant, reasons, times_us, last) for block in layout.blocks)
    return StepLives(f"{plan.workload}, predicted", layout.outside_bytes, layout.arena_bytes, lives)


def reasons_of(plan: Plan) -> dict[int, str]:
    """Why each activation is kept, swapped or recomputed, by its number."""
    moved = {*plan.schedule.swapped, *plan.schedule.recomputed}
    stays = "the schedule leaves it where it is, since it is read again before it could leave"
    return {each.value: each.reason if each.choice == "keep" or each.value in moved else stays for each in plan.choices}


def _life(block: PlacedBlock, profile: Profile, reasons: dict[int, str], times_us: list[int], last: int) -> Life:
    is_over = block.upper < last
    return Life(
        decision=DECIDED.get(block.kind) or _OTHERS[block.kind],
        label=_label(block, profile),
        why=reasons.get(block.target, "") if block.kind in DECIDED else "",
        number=block.target,
        address=block.offset,
        size_bytes=block.size_bytes,
        begin=block.lower,
        end=block.upper if is_over else None,
        begin_us=times_us[min(block.lower, len(times_us) - 1)],
        end_us=times_us[min(block.upper, len(times_us) - 1)],
    )


def _label(block: PlacedBlock, profile: Profile) -> str:
    if block.target < 0:
        return block.kind
    if block.kind in OF_VALUES:
        return profile.values[block.target].label
    op = profile.ops[block.target]
    return f"{op.module} {op.name}".strip()
