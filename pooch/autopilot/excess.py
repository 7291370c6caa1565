"""Why a step has passed the budget."""

from __future__ import annotations

from ..executor.evictor import Evictor
from ..ground.units import format_bytes
from ..torchtools.threads import has_others
from .library import MOST_FAILURES
from .remarks import (
    BACKWARD_IS_COMPILED,
    BY_OTHER_HOOKS,
    COMPILED,
    MORE_THAN_RECORDED,
    NOTHING_LEFT,
    OTHER_THREAD,
    OTHER_TRAINS,
    PLAN_NEEDS_MORE,
    nothing_left,
)
from .running import RunningStep


def why_over_budget(
    running: RunningStep, evictor: Evictor, excess_bytes: int, has_compiled: bool, is_beside: bool
) -> tuple[str, str]:
    """Return why a step has passed the budget, and what tells that reason from others.

    Args:
        running: The step, which has ended.
        evictor: Holds the budget.
        excess_bytes: By how much.
        has_compiled: Whether compiled graphs run in steps.
        is_beside: Whether another thread has trained at the same time.
    """
    fault = evictor.engine.health.fault or evictor.engine.health.known
    stayed_bytes = evictor.stayed_bytes + running.stats.kept_bytes
    if fault is not None and stayed_bytes:
        by_tier = format_bytes(min(stayed_bytes, excess_bytes))
        return f"{by_tier} of activations could not leave, as {fault}", f"stayed: {fault.kind}"
    if fault is not None and running.stats.recomputed_ops and evictor.missing_bytes:
        return f"activations were computed again, which takes more room than a copy, as {fault}", fault.kind
    why = _why_without_fault(running, has_compiled)
    if is_beside and why in (NOTHING_LEFT, MORE_THAN_RECORDED):
        why = OTHER_TRAINS
    elif why == NOTHING_LEFT and evictor.live.asks and not evictor.missing_bytes and has_others():
        why = OTHER_THREAD  # else room was asked for
    elif why == NOTHING_LEFT:
        return nothing_left(evictor.largest_need, excess_bytes), why
    return why, why


def _why_without_fault(running: RunningStep, has_compiled: bool) -> str:
    if running.decision == "plan" and running.known.needed_bytes and not running.step.left_plan:
        return PLAN_NEEDS_MORE
    if has_compiled and running.decision != "in-core":
        return COMPILED
    if running.decision != "in-core":
        return NOTHING_LEFT
    if running.known.reason == BACKWARD_IS_COMPILED:
        return BACKWARD_IS_COMPILED
    if running.known.profile is None:
        return BY_OTHER_HOOKS
    running.known.left_plan = MOST_FAILURES  # so that its next step is recorded again
    return MORE_THAN_RECORDED
