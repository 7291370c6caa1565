"""What leaves beneath a plan that needs more than the budget, on small steps by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.ir import HookCosts, Link, Profile, Schedule
from pooch.simulator.pressed import least_bytes, pressed
from tests.toys import ToyStep

LINK = Link("toy tier", 1.0, 2.0, 100.0, 100.0)
KEPT = Schedule((), (), (), (), (), 0)


def a_profile() -> Profile:
    """Four ops, each of which saves what it reads; values 1 to 3 are made, and 2 is too small to be decided on."""
    step = ToyStep()
    (current,) = (step.external(50),)
    for size_bytes in (100, 10, 200, 30):
        (current,) = step.op([current], [size_bytes], saves=[current])
    step.too_small(2)
    profile = step.build(LINK)
    small = replace(profile.values[2], fixed="smaller than 16 bytes")
    return replace(profile, values=(*profile.values[:2], small, *profile.values[3:]))


@pytest.fixture
def dataflow() -> Dataflow:
    return Dataflow(a_profile())


def test_nothing_leaves_where_the_budget_is_enough(dataflow: Dataflow) -> None:
    found = pressed(dataflow, KEPT, dataflow.in_core_points, int(dataflow.in_core_points.max()))
    assert (found.over_bytes, found.moved, found.moving_ms) == (0, (), 0.0)


def test_what_is_cheapest_for_its_bytes_leaves_first_and_no_more_than_needed(dataflow: Dataflow) -> None:
    points = dataflow.in_core_points.copy()
    point = 2 * 3 + 1  # the last forward op: values 1 and 2 are idle, and it reads 3
    points[:point] = points[point + 1 :] = 0
    for missing_bytes, moved in ((1, (1,)), (100, (1,)), (101, (1, 2)), (110, (1, 2))):
        found = pressed(dataflow, KEPT, points, int(points[point]) - missing_bytes)
        assert (found.over_bytes, found.moved) == (0, moved)
        sizes = [dataflow.profile.values[value].size_bytes for value in moved]
        assert found.moving_ms == pytest.approx(sum(LINK.out_ms(size) + LINK.in_ms(size) for size in sizes))
    assert pressed(dataflow, KEPT, points, int(points[point]) - 111).over_bytes == 1


def test_what_left_once_is_away_until_it_is_read(dataflow: Dataflow) -> None:
    points = numpy.zeros(2 * dataflow.end, dtype=numpy.int64)
    points[[5, 7]] = 10  # value 1 is idle in both
    assert pressed(dataflow, KEPT, points, 0).moved == (1,)
    read = dataflow.profile.values[1].first_unpack
    points[2 * read] = 10
    assert pressed(dataflow, KEPT, points, 0).over_bytes == 10


@pytest.mark.parametrize("role", ["sources", "recomputed", "swapped"])
def test_what_the_plan_moves_or_holds_for_replays_stays_with_the_plan(dataflow: Dataflow, role: str) -> None:
    points = numpy.zeros(2 * dataflow.end, dtype=numpy.int64)
    points[7] = 60
    found = pressed(dataflow, replace(KEPT, **{role: (1,)}), points, 0)  # type: ignore[arg-type]
    assert (found.moved, found.over_bytes) == ((2,), 50)


def test_hooks_cost_time_at_each_copy() -> None:
    dataflow = Dataflow(replace(a_profile(), hooks=HookCosts(copy_ms=0.5)))
    points = numpy.zeros(2 * dataflow.end, dtype=numpy.int64)
    points[7] = 1
    assert pressed(dataflow, KEPT, points, 0).moving_ms == pytest.approx(LINK.out_ms(100) + LINK.in_ms(100) + 1.0)


def test_the_least_peak_has_all_away_that_nobody_uses(dataflow: Dataflow) -> None:
    points, values = dataflow.in_core_points, dataflow.profile.values
    expected = []
    for point in range(2 * dataflow.end):
        idle = (v for v in values if v.saved and 2 * max(v.release, v.producer) + 2 <= point < 2 * v.first_unpack)
        expected.append(int(points[point]) - sum(value.allocated_bytes for value in idle))
    assert least_bytes(dataflow) == max(expected) < points.max()


def test_a_plan_for_calls_of_the_model_moves_nothing_that_it_does_not_decide_on() -> None:
    dataflow = Dataflow(a_profile(), "model")
    points = numpy.zeros(2 * dataflow.end, dtype=numpy.int64)
    points[7] = 110
    assert pressed(dataflow, KEPT, points, 0).moved == (1,)
