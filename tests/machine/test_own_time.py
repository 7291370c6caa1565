"""What Pooch takes in the middle of a step, as measured by a clock that the tests set."""

from __future__ import annotations

import pytest

from pooch.machine import own_time
from pooch.machine.own_time import OwnTime


class Clock:
    """A clock that stands still."""

    now_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(own_time, "time", found)
    return found


def test_what_is_within_something_else_counts_once(clock: Clock) -> None:
    own = OwnTime()
    with own:
        clock.now_ms += 1
        with own:
            clock.now_ms += 2
        clock.now_ms += 4
    clock.now_ms += 8
    with own:
        clock.now_ms += 16
    assert own.ms == pytest.approx(23)


def test_what_was_under_way_when_it_began_anew_does_not_count(clock: Clock) -> None:
    own = OwnTime()
    with own:
        clock.now_ms += 1
        own.restart()
        clock.now_ms += 2
    assert own.ms == 0
    with own:
        clock.now_ms += 4
    assert own.ms == pytest.approx(4)
