"""Placing copies in beside replays, on hand-made memory: the settled bytes of an entry decide, not its peak."""

from __future__ import annotations

import numpy
import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.occupancy import Occupancy
from pooch.schedule.swaps import SwapTables, place_absences
from tests import toys


@pytest.mark.parametrize(
    ("excess_bytes", "in_slots"),
    [
        (5, {2: 6, 1: 6}),  # settles at 95 of 100: no room for 10 more
        (15, {2: 5, 1: 6}),  # settles at 85: room for one
        (25, {2: 5, 1: 5}),  # settles at 75: room for both, after the replays
    ],
)
def test_copies_in_fill_an_entry_up_to_the_budget_after_its_replays(excess_bytes: int, in_slots: dict[int, int]):
    tables = SwapTables(Dataflow(toys.chain(5, size_bytes=10)))  # anchors at slots 5 to 8
    windows = [*tables.swapped(1, 8), *tables.swapped(2, 7)]
    points = numpy.full(22, 20, dtype=numpy.int64)
    points[9] = 115  # the body of slot 4: both have to leave
    points[10] = 120  # the entry of slot 5, with both away again 100: at its peak no room for either
    swaps = place_absences(tables, windows, Occupancy(points, {5: excess_bytes}), 100)
    assert {swap.window.value: swap.in_slot for swap in swaps} == in_slots
    assert {swap.out_slot for swap in swaps} == {4}
    assert points.max() <= 100


@pytest.mark.parametrize(
    ("excess_bytes", "in_slots"),
    [
        (5, {2: 5, 1: 6}),  # settles at 85, and with one back at 95: no room for the other
        (15, {2: 5, 1: 5}),  # settles at 75: with both back at 95
    ],
)
def test_a_copy_in_takes_its_room_from_the_entry_at_which_it_starts(excess_bytes: int, in_slots: dict[int, int]):
    """The entry alone is high here, so nothing but its own account tells the second copy that the first was there."""
    tables = SwapTables(Dataflow(toys.chain(5, size_bytes=10)))
    windows = [*tables.swapped(1, 8), *tables.swapped(2, 7)]
    points = numpy.full(22, 20, dtype=numpy.int64)
    points[9] = 115  # the body of slot 4: both have to leave
    points[10] = 110  # the entry of slot 5: with both away 90 at its peak
    memory = Occupancy(points, {5: excess_bytes})
    swaps = place_absences(tables, windows, memory, 100)
    assert {swap.window.value: swap.in_slot for swap in swaps} == in_slots
    assert points[10] == 95  # what it settles at is now its highest
    assert memory.entry_excess_bytes == {5: 0}
