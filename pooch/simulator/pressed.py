"""What leaves beneath a plan that needs more than the budget, and what that costs.

A plan is made for what it needs. Where less is held beneath it, values that it keeps leave as in a step without a plan:
those that autograd has saved, that the program no longer holds, and that the backward pass has not read yet. Values
that are too small to be decided on are among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.interpolation.structure import is_too_small
from ..ir import Schedule
from ..ir.profile import Value
from ..machine.eviction import distance, online_score


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a budget does to a plan that needs more.

    Attributes:
        over_bytes: by how much the step passes the budget all the same; 0: it does not.
        moved: values that leave in addition, in order.
        moving_ms: time of their copies out and back, which nothing hides.
    """

    over_bytes: int
    moved: tuple[int, ...]
    moving_ms: float


def pressed(dataflow: Dataflow, schedule: Schedule, point_bytes: numpy.ndarray, budget_bytes: int) -> Pressure:
    """Have values leave wherever a plan passes a budget, by the rule of a step without a plan.

    Args:
        dataflow: the profile and region that the plan is for.
        schedule: the plan's.
        point_bytes: live bytes at each point under it, int64 array of shape (2 * ops,).
        budget_bytes: what is held.
    """
    decided = {*schedule.swapped, *schedule.recomputed, *schedule.sources}
    kept = [value for value in _that_can_leave(dataflow) if value.id not in decided]
    moved: dict[int, Value] = {}
    over_bytes = 0
    for point in numpy.flatnonzero(point_bytes > budget_bytes).tolist():
        idle = [value for value in kept if point in _idle_points(value)]
        away_bytes = sum(value.allocated_bytes for value in idle if value.id in moved)
        missing_bytes = int(point_bytes[point]) - budget_bytes - away_bytes
        for value in _cheapest_first(dataflow, idle, point // 2) if missing_bytes > 0 else ():
            if missing_bytes > 0 and value.id not in moved:
                moved[value.id] = value
                missing_bytes -= value.allocated_bytes
        over_bytes = max(over_bytes, missing_bytes)
    moving_ms = sum((_copies_ms(dataflow, value) for value in moved.values()), 0.0)
    return Pressure(over_bytes, tuple(moved), moving_ms)


def least_bytes(dataflow: Dataflow) -> int:
    """The peak of a step without a plan in which everything that can leave has left, whatever that takes.

    Such a step lets inputs leave as well, once the program has released them.
    """
    inputs = [v for v in dataflow.profile.values if v.role == "external" and v.saved and dataflow.region == "step"]
    change = numpy.zeros(2 * dataflow.end + 1, dtype=numpy.int64)
    for value in (*_that_can_leave(dataflow), *inputs):
        idle = _idle_points(value)
        if idle:
            change[idle.start] -= value.allocated_bytes
            change[idle.stop] += value.allocated_bytes
    return int((dataflow.in_core_points + numpy.cumsum(change[:-1])).max())


def _that_can_leave(dataflow: Dataflow) -> list[Value]:
    """Activations, and in a whole step what is too small for one."""
    others = dataflow.profile.values if dataflow.region == "step" else ()
    return [*dataflow.activations, *(value for value in others if is_too_small(value))]


def _idle_points(value: Value) -> range:
    """The points at which only autograd holds a value, and has not read it."""
    return range(2 * max(value.release, value.producer) + 2, 2 * value.first_unpack)


def _copies_ms(dataflow: Dataflow, value: Value) -> float:
    link, size_bytes = dataflow.profile.link, value.size_bytes
    return link.out_ms(size_bytes) + link.in_ms(size_bytes) + 2 * dataflow.profile.hooks.copy_ms


def _cheapest_first(dataflow: Dataflow, values: list[Value], slot: int) -> list[Value]:
    def score(value: Value) -> float:
        ahead = distance(value.first_unpack, slot)
        return online_score(_copies_ms(dataflow, value), value.allocated_bytes, ahead)

    return sorted(values, key=score)
