"""Rooms in the tier: shared by values that are there at different times, by no others."""

from __future__ import annotations

from random import Random

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InvalidSchedule
from pooch.ir import Action, Schedule
from pooch.ir.schedule import TIER_ALIGNMENT_BYTES, ActionKind
from pooch.schedule import lower, verify
from pooch.schedule.host_layout import NEVER, _best_fit, lay_out, tier_stays
from tests.toys import chain, random_decisions, random_profile

PAGE = TIER_ALIGNMENT_BYTES


def trip(value: int, out: int, back: int, wait: int) -> list[Action]:
    kinds: tuple[ActionKind, ...] = ("copy_out", "free", "copy_in", "wait")
    return [Action(slot, kind, value) for slot, kind in zip((out, out + 1, back, wait), kinds, strict=True)]


def ordered(*trips: list[Action]) -> tuple[Action, ...]:
    return tuple(sorted((action for one in trips for action in one), key=lambda action: action.slot))


def test_a_value_that_left_after_another_was_back_takes_its_room() -> None:
    actions = ordered(trip(0, 1, 4, 5), trip(1, 2, 9, 10), trip(2, 6, 7, 8))
    offsets, host_bytes = lay_out(actions, [0, 1, 2], [3 * PAGE, PAGE, 3 * PAGE - 1])
    assert host_bytes == 4 * PAGE
    assert dict(offsets) == {0: 0, 1: 3 * PAGE, 2: 0}


def test_the_smallest_free_room_is_taken_and_its_rest_stays_free() -> None:
    actions = ordered(trip(0, 1, 2, 3), trip(1, 1, 2, 3), trip(2, 5, 8, 9), trip(3, 6, 8, 9), trip(4, 7, 8, 9))
    offsets, host_bytes = lay_out(actions, [0, 1, 2, 3, 4], [8 * PAGE, 3 * PAGE, 2 * PAGE, PAGE, 8 * PAGE])
    assert dict(offsets) == {0: 0, 1: 8 * PAGE, 2: 8 * PAGE, 3: 10 * PAGE, 4: 0}
    assert host_bytes == 11 * PAGE


@pytest.mark.parametrize("out", [4, 5])
def test_no_room_is_shared_before_compute_has_waited_for_the_copy_back(out: int) -> None:
    # the copy in starts at slot 4 and is waited for at slot 5: on two copy streams the next copy out could overtake it
    _, host_bytes = lay_out(ordered(trip(0, 1, 4, 5), trip(1, out, 8, 9)), [0, 1], [PAGE, PAGE])
    assert host_bytes == 2 * PAGE


def test_what_never_comes_back_keeps_its_room() -> None:
    gone = trip(0, 1, 4, 5)[:2]
    assert tier_stays(gone, [0])[0].last_slot == NEVER
    assert lay_out(ordered(gone, trip(1, 8, 9, 10)), [0, 1], [PAGE, PAGE])[1] == 2 * PAGE


def test_random_trips_never_meet_and_take_no_more_than_their_sum() -> None:
    random = Random(0)
    shared = 0
    for _ in range(200):
        trips, sizes = [], []
        for value in range(random.randint(1, 12)):
            out = random.randint(0, 30)
            back = out + random.randint(2, 12)
            trips.append(trip(value, out, back, back + random.randint(0, 2)))
            sizes.append(random.randint(1, 5 * PAGE))
        layout, host_bytes = lay_out(ordered(*trips), range(len(trips)), sizes)
        offsets = dict(layout)
        for a in range(len(trips)):
            for b in range(a):
                together = trips[a][0].slot <= trips[b][-1].slot and trips[b][0].slot <= trips[a][-1].slot
                apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
                assert apart or not together
        total = sum(-(-size // PAGE) * PAGE for size in sizes)
        assert max(offsets[v] + sizes[v] for v in offsets) <= host_bytes <= total
        shared += host_bytes < total
    assert shared > 100


def test_where_best_fit_wastes_room_the_packer_places_the_values() -> None:
    random = Random(2)
    best_fit_bytes = tier_bytes = bound_bytes = 0
    for _ in range(200):
        actions, sizes = [], []
        for value in range(random.randint(4, 14)):
            out, away = random.randint(0, 30), random.randint(2, 12)
            actions += trip(value, out, out + away, out + away + random.randint(0, 2))
            sizes.append(random.randint(1, 5 * PAGE))
        actions.sort(key=lambda action: action.slot)
        stays = tier_stays(actions, range(len(sizes)))
        _, top = _best_fit(stays, sizes)
        tier = lay_out(actions, range(len(sizes)), sizes)[1]
        assert tier <= top
        best_fit_bytes, tier_bytes = best_fit_bytes + top, tier_bytes + tier
        bound_bytes += max(
            sum(-(-sizes[s.value] // PAGE) * PAGE for s in stays if s.first_slot <= slot <= s.last_slot)
            for slot in range(60)
        )
    assert bound_bytes <= tier_bytes < best_fit_bytes


def test_the_verifier_refuses_rooms_that_are_shared_too_early() -> None:
    dataflow = Dataflow(chain(6, size_bytes=PAGE))
    first, second = dataflow.activations[0].id, dataflow.activations[1].id
    schedule = lower(dataflow, {first: "swap", second: "swap"}, 1)
    assert schedule.host_bytes == 2 * PAGE, "both are in the tier when the forward pass ends"
    shared = Schedule(
        schedule.actions, schedule.sources, (), schedule.swapped, ((first, 0), (second, 0)), schedule.host_bytes
    )
    with pytest.raises(InvalidSchedule, match=f"values {first} and {second} overlap in the tier"):
        verify(dataflow, shared, {first: "swap", second: "swap"}, None)


def test_what_is_back_in_the_forward_pass_leaves_its_room_to_others() -> None:
    # GIVEN random steps, of some values of which the program looks away for a while
    shared = 0
    for seed in range(1100, 1400):
        random = Random(seed)
        profile = random_profile(random, random.randint(6, 16))
        dataflow = Dataflow(profile)
        decisions = random_decisions(random, dataflow)
        most_swap = {v: choice if random.random() > 0.7 else "swap" for v, choice in decisions.items()}
        # WHEN they are lowered THEN no two values meet in the tier, and sometimes two have one room in turn
        schedule = lower(dataflow, most_swap, int(profile.peak_bytes * random.choice([0.3, 0.5, 0.7, 0.8, 0.9])))
        verify(dataflow, schedule, most_swap, None)
        shared += schedule.host_bytes < len(schedule.swapped) * PAGE
    assert shared > 0
