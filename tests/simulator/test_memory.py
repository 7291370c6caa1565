"""Bytes at points, by hand."""

from __future__ import annotations

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.occupancy import occupancy
from pooch.ir import Action, Schedule
from pooch.schedule import lower
from pooch.simulator import simulate
from tests import toys


def test_a_value_is_away_from_its_free_to_its_copy_in():
    dataflow = Dataflow(toys.chain(5, size_bytes=10))
    schedule = lower(dataflow, {1: "swap"}, 1)  # freed at slot 2, back at slot 8
    away = (dataflow.in_core_points - simulate(dataflow, schedule).point_bytes).tolist()
    assert away == [0] * 4 + [10] * 12 + [0] * 6


def test_a_recomputed_value_is_away_from_its_release_to_its_replay():
    dataflow = Dataflow(toys.chain(5, size_bytes=10))
    schedule = lower(dataflow, {3: "recompute"}, 1)  # released in slot 3, needed in slot 6
    away = (dataflow.in_core_points - simulate(dataflow, schedule).point_bytes).tolist()
    assert away == [0] * 8 + [10] * 4 + [0] * 10


def test_an_entry_counts_the_workspace_of_replays_and_the_intermediates_beside_it():
    profile = toys.chain(3, size_bytes=10, unsaved_between=1, workspace_bytes=7)
    dataflow = Dataflow(profile)
    timeline = simulate(dataflow, lower(dataflow, {2: "recompute"}, 1))
    entry = 2 * 9
    settled = int(dataflow.in_core_points[entry])  # the input and value 2
    assert timeline.point_bytes[entry] == settled + 10 + 7  # value 1 while op 1 runs, and its workspace


def test_an_entry_begins_after_its_leading_frees():
    dataflow = Dataflow(toys.chain(4, size_bytes=10))
    out, free = Action(1, "copy_out", 1), Action(4, "free", 1)
    back, wait = Action(4, "copy_in", 1), Action(6, "wait", 1)
    points = occupancy(dataflow, [out, free, back, wait], ()).point_bytes
    assert points.tolist() == dataflow.in_core_points.tolist()
    late = occupancy(dataflow, [out, Action(4, "copy_out", 2), back, free], ()).point_bytes
    assert late[2 * 4] == dataflow.in_core_points[2 * 4] + 10  # a free behind other actions does not lower their peak


def test_an_empty_schedule_costs_nothing():
    profile = toys.ladder(4)
    timeline = simulate(Dataflow(profile), Schedule((), (), (), (), (), 0))
    assert timeline.peak_bytes == profile.peak_bytes
    assert timeline.host_bytes == 0
