"""Whether steps without a plan replay or copy is chosen by what both have taken."""

from __future__ import annotations

import pytest

from pooch.autopilot.online_ways import OnlineWays
from pooch.executor.owner import Effort

pytestmark = pytest.mark.cpu


def ways_of(
    steps: int,
    *,
    replayed_ms: float,
    copied_ms: float,
    effort: Effort,
    ways: OnlineWays | None = None,
) -> list[bool]:
    """Run steps of 100 ms, in which Pooch takes more or less, and return which of them replayed."""
    ways = ways or OnlineWays()
    found = []
    for _ in range(steps):
        replays = ways.next_replays()
        own_ms = replayed_ms if replays else copied_ms
        ways.took(effort if replays else Effort(), 100 + own_ms, own_ms, replays=replays)
        found.append(replays)
    return found


WORTHWHILE = Effort(recording_ms=1, gained_ms=20)  # as far as copies take what is expected of them


@pytest.mark.parametrize(("copied_ms", "is_faster"), [(20.0, True), (40.0, False)])
def test_both_are_tried_twice_and_the_faster_one_is_taken(copied_ms: float, is_faster: bool) -> None:
    found = ways_of(54, replayed_ms=30, copied_ms=copied_ms, effort=WORTHWHILE)
    assert found[:4] == [True, False, True, False]
    assert found[4:] == [not is_faster] * 50


@pytest.mark.parametrize(("copied_ms", "is_faster"), [(10.0, True), (70.0, False)])
def test_one_step_of_each_is_enough_where_the_difference_is_clear(copied_ms: float, is_faster: bool) -> None:
    found = ways_of(52, replayed_ms=30, copied_ms=copied_ms, effort=WORTHWHILE)
    assert found == [True, False, *[not is_faster] * 50]


def test_a_slow_first_step_does_not_decide_where_a_later_one_is_like_copies() -> None:
    ways = OnlineWays()
    for number, (own_ms, replays) in enumerate([(60, True), (40, False), (30, True), (40, False)]):
        assert ways.next_replays() is replays, number
        ways.took(WORTHWHILE if replays else Effort(), 100 + own_ms, own_ms, replays=replays)
    assert all(ways.next_replays() for _ in range(50))


def test_both_are_tried_again_after_a_while() -> None:
    ways = OnlineWays()
    ways_of(54, replayed_ms=30, copied_ms=20, effort=WORTHWHILE, ways=ways)
    found = ways_of(6, replayed_ms=30, copied_ms=50, effort=WORTHWHILE, ways=ways)
    assert found == [True, False, True, False, True, True]


def test_what_is_expected_to_take_much_longer_is_not_tried() -> None:
    effort = Effort(recording_ms=1, gained_ms=1000)
    assert all(ways_of(100, replayed_ms=30, copied_ms=10, effort=effort))


def test_where_recording_takes_longer_than_it_gains_the_next_steps_copy() -> None:
    effort = Effort(recording_ms=3, gained_ms=2)
    assert ways_of(53, replayed_ms=30, copied_ms=50, effort=effort) == [True, *[False] * 50, True, False]


def test_where_it_is_not_known_what_steps_take_they_replay_as_long_as_that_gains() -> None:
    ways = OnlineWays()
    for _ in range(10):
        assert ways.next_replays()
        ways.took(WORTHWHILE, 100, None, replays=True)
    ways.took(Effort(recording_ms=3), 100, None, replays=True)
    assert not ways.next_replays()


def test_where_a_step_passed_the_budget_all_later_ones_copy() -> None:
    ways = OnlineWays()
    ways.only_copy()
    assert not any(ways_of(200, replayed_ms=1, copied_ms=100, effort=WORTHWHILE, ways=ways))
