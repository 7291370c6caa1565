"""Copies at times that a method prescribes itself, for schedules that only swap.

The lowering frees as late and copies in as early as the budget lets it, and leaves out what never has to leave. Methods
that do otherwise (everything leaves; one layer ahead) take the lowered trips and change their slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...analysis.dataflow import Dataflow
from ...ir.plan import Decisions
from ...ir.schedule import Action, Schedule
from ...planner.contract import Evaluation, Evaluator


@dataclass(frozen=True, slots=True)
class Trip:
    """One value's way out and back, as slots. `in_slot`, `need_slot`: -1 where it never comes back."""

    value: int
    out_slot: int
    free_slot: int
    in_slot: int = -1
    need_slot: int = -1


def trips_of(schedule: Schedule) -> dict[int, Trip]:
    """The trips between forward and backward pass of a schedule that replays nothing, by value."""
    slots: dict[tuple[str, int], int] = {(action.kind, action.target): action.slot for action in schedule.actions}
    return {
        value: Trip(
            value,
            slots["copy_out", value],
            slots["free", value],
            slots.get(("copy_in", value), -1),
            slots.get(("wait", value), -1),
        )
        for value in schedule.swapped
        if ("free", value) in slots  # else it is away within the forward pass alone
    }


def swap_schedule(layout: Schedule, trips: dict[int, Trip], like: Schedule | None = None) -> Schedule:
    """A schedule of these trips.

    Within an entry: copies out, frees, copies in that are needed here, others in order of need, waits.

    Args:
        layout: has room in the tier for everything that is moved.
        trips: by value.
        like: what leaves and comes back within the forward pass does so as in this schedule; None: nothing does.
    """
    staged = [] if like is None else list(_forward_absences(like, trips))
    for trip in trips.values():
        staged.append(((trip.out_slot, 0, trip.value), Action(trip.out_slot, "copy_out", trip.value)))
        staged.append(((trip.free_slot, 1, trip.value), Action(trip.free_slot, "free", trip.value)))
        if trip.in_slot >= 0:
            staged.append(((trip.in_slot, 2, trip.need_slot), Action(trip.in_slot, "copy_in", trip.value)))
            staged.append(((trip.need_slot, 3, trip.value), Action(trip.need_slot, "wait", trip.value)))
    actions = tuple(action for _, action in sorted(staged, key=lambda pair: pair[0]))
    swapped = {action.target for action in actions if action.kind == "copy_out"}
    offsets = tuple((value, offset) for value, offset in layout.host_offsets if value in swapped)
    return replace(layout, actions=actions, swapped=tuple(sorted(swapped)), host_offsets=offsets)


def _forward_absences(schedule: Schedule, trips: dict[int, Trip]) -> Iterator[tuple[tuple[int, int, int], Action]]:
    """What a schedule does within the forward pass to values that the program still holds."""
    stage = {"copy_out": 0, "empty": 1, "refill": 2, "wait": 3}
    emptied = {action.target for action in schedule.actions if action.kind == "empty"}
    filling: set[int] = set()
    for action in schedule.actions:
        value = action.target
        is_first_copy = action.kind == "copy_out" and value in emptied and value not in trips
        is_wait = action.kind == "wait" and value in filling
        if is_first_copy or is_wait or action.kind in ("empty", "refill"):
            yield (action.slot, stage[action.kind], value), action
        filling = filling | {value} if action.kind == "refill" else filling - {value} if is_wait else filling


def everything_leaves(evaluator: Evaluator, dataflow: Dataflow, decisions: Decisions, budget_bytes: int) -> Evaluation:
    """Swap all that is decided on, also what has room to stay; its copies come in as soon as the backward pass begins.

    Args:
        evaluator: lowering and simulation.
        dataflow: of the step.
        decisions: swaps only, of values that can wait for the backward pass: no two then share room in the tier.
        budget_bytes: bound on all device bytes.
    """
    tight = evaluator.evaluate(decisions, 0).schedule
    within = evaluator.evaluate(decisions, budget_bytes).schedule
    needed = trips_of(within)
    trips = {value: needed.get(value) or _leisurely(trip, dataflow) for value, trip in trips_of(tight).items()}
    return played(evaluator, swap_schedule(tight, trips, within))


def _leisurely(trip: Trip, dataflow: Dataflow) -> Trip:
    """Out until the forward pass ends, and back at the first anchor after that: it has room to stay all the time."""
    if trip.in_slot < 0:
        return trip
    free_slot = max(trip.free_slot, dataflow.forward_slots[-1])
    anchors = dataflow.anchor_slots
    place = bisect_right(anchors, free_slot)
    return replace(trip, free_slot=free_slot, in_slot=min(anchors[place], trip.need_slot))


def delayed(dataflow: Dataflow, trips: dict[int, Trip], anchors_ahead: int) -> dict[int, Trip]:
    """Start each copy in at most so many anchors before its need: later than lowered, so it fits as well."""
    return {
        value: replace(trip, in_slot=max(trip.in_slot, _ahead(dataflow, trip, anchors_ahead)))
        if trip.in_slot >= 0
        else trip
        for value, trip in trips.items()
    }


def one_anchor_ahead(dataflow: Dataflow, trips: dict[int, Trip]) -> dict[int, Trip]:
    """Start each copy in at the anchor before its need, whether or not that fits."""
    return {
        value: replace(trip, in_slot=_ahead(dataflow, trip, 1)) if trip.in_slot >= 0 else trip
        for value, trip in trips.items()
    }


def _ahead(dataflow: Dataflow, trip: Trip, anchors: int) -> int:
    """The slot so many anchors before the need, but after the value was freed."""
    slots = dataflow.anchor_slots
    place = max(0, bisect_left(slots, trip.need_slot) - anchors)
    place = max(place, bisect_right(slots, trip.free_slot))
    return min(slots[place], trip.need_slot)


def played(evaluator: Evaluator, schedule: Schedule) -> Evaluation:
    """The schedule with its simulation."""
    return Evaluation(schedule, evaluator.play(schedule))
