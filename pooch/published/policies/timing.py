"""Copies at times that a method prescribes, for schedules that only swap.

The lowering frees as late and copies in as early as the budget permits, and omits what never has to leave. Methods that
differ (everything leaves; one layer ahead) change the slots of the lowered trips.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...analysis.dataflow import Dataflow
from ...ir.plan import Decisions
from ...ir.schedule import Action, Schedule
from ...planner.contract import Evaluation, Evaluator
from ...schedule.host_layout import lay_out


@dataclass(frozen=True, slots=True)
class Trip:
    """The slots of a value's way out and back.

    Attributes:
        value: its id.
        out_slot: where the copy out starts.
        free_slot: where its bytes are freed.
        in_slot: where the copy in starts, or -1 if it never comes back.
        need_slot: where it has to be back, or -1 if it never comes back.
    """

    value: int
    out_slot: int
    free_slot: int
    in_slot: int = -1
    need_slot: int = -1


def trips_of(schedule: Schedule) -> dict[int, Trip]:
    """Return the trips between forward and backward pass of a schedule without replays, by value."""
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
        if ("free", value) in slots  # otherwise it is away only within the forward pass
    }


def swap_schedule(
    dataflow: Dataflow, layout: Schedule, trips: dict[int, Trip], like: Schedule | None = None
) -> Schedule:
    """Make a schedule from trips.

    Order within an entry: copies out, frees, copies in that are needed there, other copies in by need, waits.

    Args:
        dataflow: of the step.
        layout: a schedule whose tier has room for everything that is moved.
        trips: by value.
        like: schedule from which absences within the forward pass are taken. None: there are none.
    """
    staged = [] if like is None else list(_forward_absences(like, trips))
    for trip in trips.values():
        staged.append(((trip.out_slot, 0, trip.value), Action(trip.out_slot, "copy_out", trip.value)))
        staged.append(((trip.free_slot, 1, trip.value), Action(trip.free_slot, "free", trip.value)))
        if trip.in_slot >= 0:
            staged.append(((trip.in_slot, 2, trip.need_slot), Action(trip.in_slot, "copy_in", trip.value)))
            staged.append(((trip.need_slot, 3, trip.value), Action(trip.need_slot, "wait", trip.value)))
    actions = tuple(action for _, action in sorted(staged, key=lambda pair: pair[0]))
    return only_moved(dataflow, replace(layout, actions=actions))


def only_moved(dataflow: Dataflow, schedule: Schedule) -> Schedule:
    """Return the schedule with a tier for what its actions copy out, which may be less than what it was made for."""
    swapped = tuple(sorted({action.target for action in schedule.actions if action.kind == "copy_out"}))
    if swapped == schedule.swapped:
        return schedule
    sizes = [value.size_bytes for value in dataflow.profile.values]
    offsets, host_bytes = lay_out(schedule.actions, swapped, sizes)
    return replace(schedule, swapped=swapped, host_offsets=offsets, host_bytes=host_bytes)


def _forward_absences(schedule: Schedule, trips: dict[int, Trip]) -> Iterator[tuple[tuple[int, int, int], Action]]:
    """Yield what a schedule does within the forward pass to values that the program still holds."""
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
    """Swap all values in `decisions`. Those with room to stay are copied in when the backward pass begins.

    Args:
        evaluator: lowers and simulates.
        dataflow: of the step.
        decisions: only swaps, of values that can wait for the backward pass, so that no two share room in the tier.
        budget_bytes: bound on all device bytes.
    """
    tight = evaluator.evaluate(decisions, 0).schedule
    within = evaluator.evaluate(decisions, budget_bytes).schedule
    needed = trips_of(within)
    trips = {value: needed.get(value) or _leisurely(trip, dataflow) for value, trip in trips_of(tight).items()}
    return played(evaluator, swap_schedule(dataflow, tight, trips, within))


def _leisurely(trip: Trip, dataflow: Dataflow) -> Trip:
    """Return a trip that frees at the end of the forward pass and copies in at the first anchor after it."""
    if trip.in_slot < 0:
        return trip
    free_slot = max(trip.free_slot, dataflow.forward_slots[-1])
    anchors = dataflow.anchor_slots
    place = bisect_right(anchors, free_slot)
    return replace(trip, free_slot=free_slot, in_slot=min(anchors[place], trip.need_slot))


def started_at(trips: dict[int, Trip], start: Callable[[Trip], int], *, even_earlier: bool = False) -> dict[int, Trip]:
    """Start each copy in at the anchor that a method names.

    Args:
        trips: by value.
        start: names the anchor.
        even_earlier: whether also before the slot of the lowering, which may not fit.
    """
    return {
        value: replace(trip, in_slot=min(max(0 if even_earlier else trip.in_slot, start(trip)), trip.need_slot))
        if trip.in_slot >= 0
        else trip
        for value, trip in trips.items()
    }


def anchors_ahead(dataflow: Dataflow, anchors: int) -> Callable[[Trip], int]:
    """Return what names the anchor so many anchors before the need, but after the value is freed."""
    slots = dataflow.anchor_slots

    def ahead(trip: Trip) -> int:
        place = max(0, bisect_left(slots, trip.need_slot) - anchors)
        place = max(place, bisect_right(slots, trip.free_slot))
        return min(slots[place], trip.need_slot)

    return ahead


def played(evaluator: Evaluator, schedule: Schedule) -> Evaluation:
    """Simulate a schedule."""
    return Evaluation(schedule, evaluator.play(schedule))


def played_from(
    evaluator: Evaluator, dataflow: Dataflow, schedule: Schedule, start: Callable[[Trip], int]
) -> Evaluation:
    """Simulate a schedule with each copy in started at the anchor that a method names, never earlier than lowered."""
    return played(evaluator, swap_schedule(dataflow, schedule, started_at(trips_of(schedule), start), schedule))
