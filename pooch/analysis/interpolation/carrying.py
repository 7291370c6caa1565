"""Decisions that were made for one shape, for another one."""

from __future__ import annotations

from ...ground.errors import PlanMismatch
from ...ir.plan import Choice, Decisions, Region
from ...ir.profile import Profile
from ..dataflow import Dataflow
from .structure import difference


def carried_over(
    decisions: Decisions, from_profile: Profile, to_profile: Profile, region: Region = "model"
) -> dict[int, Choice]:
    """The decisions of a plan, for the same ops at another shape.

    What is an activation at both shapes keeps its decision. What is one only at the first shape has no decision at the
    other; what is one only at the other is kept.

    Args:
        decisions: Of the plan.
        from_profile: That the plan was made for.
        to_profile: Of the same step at another shape; a smaller one, if the decisions have to fit into the same budget.
        region: Of the plan.

    Raises:
        PlanMismatch: The profiles differ in more than sizes.
    """
    found = difference(from_profile, to_profile)
    if found:
        raise PlanMismatch(f"the plan is for a step that takes another path ({found}): plan this step on its own")
    return {value.id: decisions.get(value.id, "keep") for value in Dataflow(to_profile, region).activations}
