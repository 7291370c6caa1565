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


def test_a_function_is_measured_but_not_twice(clock: Clock) -> None:
    own = OwnTime()

    def passes(ms: float) -> float:
        clock.now_ms += ms
        return ms

    def fails(restarts: bool) -> None:
        clock.now_ms += 8
        if restarts:
            own.restart()
        raise ValueError

    def nested(ms: float) -> None:
        own.measured(passes)(ms)
        with own:
            clock.now_ms += 2

    assert own.measured(passes)(1) == 1
    assert own.ms == pytest.approx(1)
    own.measured(nested)(4)
    assert own.ms == pytest.approx(7)
    for restarts, ms in ((False, 15), (True, 0)):
        with pytest.raises(ValueError, match=""):
            own.measured(fails)(restarts)
        assert own.ms == pytest.approx(ms)


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
