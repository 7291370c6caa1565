"""Whether calls of a step run whole or in slices: a choice between two profiles of the step, each with its own plan.

The choice is one binary variable above the integer program, and there are two values of it to try: each is a program,
and the smaller of their lower bounds holds for every plan of either kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ground.errors import InfeasibleBudget
from ..ground.units import format_bytes, format_ms
from ..ir import Plan, Profile, Region
from ..planner.contract import OPTIMAL_GAP, gap_between

Make = Callable[[Profile, float], Plan]


def in_slices(profile: Profile, region: Region) -> Profile | None:
    """The step in slices, if there is one whose calls all lie in the region."""
    made = profile.in_slices
    if made is None:
        return None
    if region == "model" and not all(made.model_begin <= split.op < made.model_end for split in made.splits):
        return None
    return made


def whole_or_in_slices(whole: Profile, split: Profile, make: Make) -> Plan:
    """Plan a step whole and in slices, and return the faster plan; whole, if both are equally fast.

    Args:
        whole: the plain step.
        split: the same step in slices.
        make: plans a profile in a share of the time limit.

    Raises:
        InfeasibleBudget: neither fits; names the smaller of the two smallest budgets.
    """
    try:
        plain = make(whole, 0.5)
    except InfeasibleBudget as error:
        return _only_in_slices(whole, split, make, error)
    if not plain.schedule.actions or plain.predicted_step_ms <= split.step_ms:  # in slices, ops alone take longer
        return plain
    try:
        sliced = make(split, 0.5)
    except InfeasibleBudget as error:
        needs = f"in slices it needs at least {format_bytes(error.minimum_bytes)}"
        return replace(plain, notes=(*plain.notes, f"the loss stays whole: {needs}"))
    bound_ms = min(plain.lower_bound_ms, sliced.lower_bound_ms)
    if plain.predicted_step_ms <= sliced.predicted_step_ms:
        slower = f"in slices the step would take {format_ms(sliced.predicted_step_ms)}"
        return _bounded(replace(plain, notes=(*plain.notes, f"the loss stays whole: {slower}")), bound_ms)
    reason = f"whole, the step would take {format_ms(plain.predicted_step_ms)}"
    return _bounded(_sliced(whole, sliced, reason), bound_ms)


def _only_in_slices(whole: Profile, split: Profile, make: Make, error: InfeasibleBudget) -> Plan:
    try:
        sliced = make(split, 1.0)
    except InfeasibleBudget as other:
        raise (other if other.minimum_bytes < error.minimum_bytes else error) from None
    return _sliced(whole, sliced, f"whole, the step needs at least {format_bytes(error.minimum_bytes)}")


def _sliced(whole: Profile, plan: Plan, reason: str) -> Plan:
    """A plan of the step in slices, beside the plain step in-core."""
    return replace(
        plan,
        splits=tuple(replace(split, reason=reason) for split in plan.splits),
        in_core_peak_bytes=whole.peak_bytes,
        in_core_step_ms=whole.step_ms,
    )


def _bounded(plan: Plan, bound_ms: float) -> Plan:
    """A plan with the bound that holds for both kinds."""
    gap = gap_between(plan.predicted_step_ms, bound_ms)
    if plan.status == "optimal" and gap > OPTIMAL_GAP:
        plan = replace(plan, status="feasible")
    return replace(plan, lower_bound_ms=bound_ms, gap=gap)
