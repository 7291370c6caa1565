"""Who of what outlives a step stays, and when the others leave and come back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.persistence import (
    SLICE_TEMPORARIES,
    Cycle,
    can_move,
    present_points,
    residence,
    residence_of,
    with_resident,
)
from pooch.ir import PersistentTensor, Profile
from pooch.ir.profile import InFlight
from pooch.ir.schedule import Schedule
from pooch.schedule import verify_residence
from pooch.simulator import simulate_moving
from tests.persistent_toys import layered, persistent_profiles, total_points, with_tensors
from tests.toys import FAST_LINK, chain

NOTHING = Schedule((), (), (), (), (), 0)


def room_of(cycle: Cycle, random: Random) -> numpy.ndarray:
    """Room that suffices for what is used, and varies."""
    most = max(1, cycle.in_core_bytes)
    more = numpy.array([random.choice([0, 0, random.randint(0, most)]) for _ in range(cycle.count)])
    room: numpy.ndarray = cycle.need_bytes + cycle.temporary_bytes + more
    return room


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(persistent_profiles(), st.sampled_from([0, 10, 60]), st.randoms(use_true_random=False))
def test_all_that_is_used_is_there_and_the_room_suffices(profile: Profile, ahead_bytes: int, random: Random) -> None:
    # GIVEN room in which each position has at least what it uses
    cycle = Cycle(profile)
    room_bytes = room_of(cycle, random)
    # WHEN it is decided who is away when
    found = residence(cycle, room_bytes, ahead_bytes)
    # THEN that counts by itself, within the room, and says what it is to a file and back
    assert found is not None
    assert (found.here_bytes + cycle.temporary_bytes <= room_bytes).all()
    step = simulate_moving(Dataflow(with_resident(profile)), NOTHING, found, detail=False)
    verify_residence(found, step.timeline, 2**40)
    again = residence_of(cycle, found.moves())
    assert again is not None
    assert sorted(again.absences, key=repr) == sorted(found.absences, key=repr)
    assert (again.here_bytes == found.here_bytes).all()
    # AND one byte less at any position that has just what it uses is refused
    tight = numpy.flatnonzero(room_bytes == cycle.need_bytes + cycle.temporary_bytes)
    if len(tight):
        room_bytes[random.choice(tight.tolist())] -= 1
        assert residence(cycle, room_bytes) is None


def copied_back(cycle: Cycle, room: int) -> int:
    found = residence(cycle, numpy.full(cycle.count, room) + cycle.temporary_bytes)
    assert found is not None
    return found.copied_in_bytes


def fewest_copied_back(cycle: Cycle, room: int) -> int:
    """The fewest bytes copied back by any choice of gaps in which tensors of one size are away."""
    gaps = []
    for number, uses in enumerate(cycle.uses):
        for place, use in enumerate(uses):
            last = place + 1 == len(uses)
            following = uses[0] + cycle.count if last else uses[place + 1]
            positions = {position % cycle.count for position in range(use + 1, following)}
            gaps.append((number, frozenset(positions)))
    fewest = 2**60
    for chosen in product([False, True], repeat=len(gaps)):
        here = numpy.full(cycle.count, cycle.in_core_bytes)
        for (number, positions), is_away in zip(gaps, chosen, strict=True):
            if is_away:
                here[list(positions)] -= cycle.tensors[number].allocated_bytes
        if (here <= room).all():
            away = [gap for gap, is_away in zip(gaps, chosen, strict=True) if is_away]
            fewest = min(fewest, sum(cycle.tensors[number].size_bytes for number, _ in away))
    return fewest


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_no_choice_copies_less_where_sizes_are_equal(seed: int) -> None:
    """MIN is optimal for pages of one size; the step repeats, so the last copy of a cycle may differ by one tensor."""
    random = Random(seed)
    profile = chain(3, link=FAST_LINK)
    slots = range(len(profile.ops))
    tensors = tuple(
        PersistentTensor(
            f"p{n}", "parameter", 8, 8, tuple(sorted(random.sample(slots, random.choice([1, 2])))), False, False
        )
        for n in range(4)
    )
    cycle = Cycle(with_tensors(profile, tensors))
    least = int(cycle.need_bytes.max())
    for room in range(least, cycle.in_core_bytes + 1, 8):
        assert copied_back(cycle, room) <= fewest_copied_back(cycle, room) + 8


def test_with_all_the_room_everything_stays_and_nothing_is_copied() -> None:
    profile = with_tensors(chain(4), layered(4))
    cycle = Cycle(profile)
    found = residence(cycle, numpy.full(cycle.count, 2**40))
    assert found is not None
    assert not found.absences
    assert found.copied_out_bytes == found.copied_in_bytes == found.tier_bytes == 0
    assert (found.point_bytes() == present_points(profile)).all()


def test_frozen_parameters_leave_for_nothing_and_trained_ones_by_one_copy_a_step() -> None:
    for frozen in (True, False):
        profile = with_tensors(chain(6), layered(6, frozen=frozen, state_factor=0))
        cycle = Cycle(profile)
        room_bytes = cycle.need_bytes + cycle.temporary_bytes
        found = residence(cycle, room_bytes)
        assert found is not None
        parameters = [move for move in found.moves() if move.kind == "parameter"]
        assert len(parameters) == 6
        assert [move.copies_out for move in parameters] == [int(not frozen)] * 6
        assert max(len(move.away) for move in parameters) >= 2


def test_state_is_away_in_the_step_and_comes_for_its_slice() -> None:
    profile = with_tensors(chain(5), layered(5, state_factor=4))
    cycle = Cycle(profile)
    room_bytes = cycle.room_bytes(profile.peak_bytes - 5 * 4 * 64, total_points(with_resident(profile)))
    room_bytes[len(profile.ops) :] += 2 * 4 * 64
    found = residence(cycle, room_bytes)
    assert found is not None
    coming_back = [
        absence for absence in found.absences if absence.returns >= 0
    ]  # but for gradients that are done with
    assert {cycle.tensors[absence.tensor].kind for absence in coming_back} == {"state"}
    for move in (move for move in found.moves() if move.kind == "state"):
        ((leaves, returns, need),) = move.away
        assert need >= len(profile.ops), "the slice of its parameter"
        assert leaves != returns


def test_slices_take_temporaries() -> None:
    profile = with_tensors(chain(2), layered(2, size_bytes=64))
    cycle = Cycle(profile)
    assert cycle.temporary_bytes.tolist() == [0] * len(profile.ops) + [SLICE_TEMPORARIES * 64] * 2
    assert cycle.slices == ("0.weight", "1.weight")


def test_taking_it_out_and_putting_it_back_is_the_same_step() -> None:
    profile = with_tensors(chain(4), layered(4))
    again = with_resident(profile, present_points(profile))
    assert again.ops == profile.ops
    assert again.peak_bytes == profile.peak_bytes
    bare = with_resident(profile)
    assert (total_points(bare) + present_points(profile) == total_points(profile)).all()
    assert not bare.persistent
    assert bare.persistent_bytes == profile.persistent_bytes - 4 * 3 * 64


@pytest.mark.parametrize(
    "change",
    [
        {"persistent": ()},
        {"accumulates": True},
        {"in_flight": InFlight(2, 10)},
    ],
    ids=["nothing", "accumulating", "in flight"],
)
def test_where_nothing_of_it_can_move(change: dict[str, object]) -> None:
    profile = with_tensors(chain(4), layered(4))
    assert can_move(profile)
    assert not can_move(replace(profile, **change))  # type: ignore[arg-type]
