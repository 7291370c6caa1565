"""What is small compared with the budget is looked at once nothing else is left."""

from __future__ import annotations

import pytest

from pooch.ir import Link
from pooch.machine import CopySpeed, Pressure, Value
from pooch.machine.growing import GrowingBudget
from pooch.simulator.modelled import ModelledClock, ModelledCounters, ModelledMemory, ModelledStorage, ModelledTier

LINK = Link("a modelled tier", 0.0, 0.0, 10.0, 10.0)
BUDGET_BYTES, LARGE_BYTES, SMALL_BYTES = 16_000, 2_000, 5  # what is smaller than 10 is small


class Outliving(Value):
    """A value that outlives the step."""

    outlives_steps = True


class Step:
    """Keeps a small value before each large one, and registers them when it is asked to."""

    thread = 0

    def __init__(self, count: int = 3, kind: type[Value] = Value, large_bytes: int = LARGE_BYTES) -> None:
        self.memory = ModelledMemory()
        tier = ModelledTier(ModelledClock(LINK), None)
        speed = CopySpeed("a modelled tier")
        speed.start_from(LINK)
        self.pressure = Pressure(BUDGET_BYTES, self.memory, self.memory, tier, speed, ModelledCounters())
        self.asked: list[int] = []
        self.values: list[Value] = []
        for number in range(count):
            for size_bytes, of_kind in ((SMALL_BYTES, Value), (large_bytes, kind)):
                self.values.append(of_kind(2 * number, None, ModelledStorage(self.memory, size_bytes)))
        self._kept = dict(enumerate(self.values, 1))
        self.pressure.keeps(self)

    def let_kept_leave(self, least_bytes: int = 0) -> bool:
        self.asked.append(least_bytes)
        for position, value in list(self._kept.items()):
            if value.size_bytes >= least_bytes:
                value.place = ModelledTier(ModelledClock(LINK), None).take(value.size_bytes)
                self.pressure.save(self._kept.pop(position), position)
        return bool(self._kept)


@pytest.fixture
def step() -> Step:
    return Step()


def test_small_values_stay_as_long_as_others_make_room(step: Step) -> None:
    step.pressure.make_room(3 * LARGE_BYTES)
    assert step.asked == [10]
    assert [value.saved_at for value in step.values] == [0, 2, 0, 4, 0, 6]
    assert [value.storage is None for value in step.values] == [False, True] * 3


def test_small_values_leave_where_the_others_are_not_enough(step: Step) -> None:
    step.pressure.make_room(3 * LARGE_BYTES + 1)
    assert step.asked == [10, 0]
    assert all(value.storage is None for value in step.values if value.size_bytes == LARGE_BYTES)
    assert any(value.storage is None for value in step.values if value.size_bytes == SMALL_BYTES)


def test_what_is_only_to_spare_is_not_made_up_of_small_values() -> None:
    step = Step(count=1, large_bytes=20)  # less than is freed at once
    step.pressure.make_room(20)
    assert step.asked == [10]
    assert [value.storage is None for value in step.values] == [False, True]


def test_values_that_are_registered_later_keep_their_places_in_the_order_of_saving(step: Step) -> None:
    """The backward pass reads the latest first, and goes on from where it has come to."""
    step.pressure.make_room(1)
    position = step.pressure._position
    step.let_kept_leave()
    assert [value.saved_at for value in step.values] == [1, 2, 3, 4, 5, 6]
    assert step.pressure._position == position == 6
    another = Value(99, None, ModelledStorage(step.memory, LARGE_BYTES))
    step.pressure.save(another)
    assert another.saved_at == 7


def test_what_outlives_the_step_does_not_leave_before_small_values_were_looked_at() -> None:
    step = Step(kind=Outliving)
    step.pressure.make_room(1)
    assert step.asked == [10, 0]


def test_where_the_budget_grows_with_the_step_nothing_is_small(step: Step) -> None:
    step.pressure.store.growing = GrowingBudget(step.memory, 0.5)
    assert step.pressure.small_bytes == 0


def test_when_nothing_fits_everything_is_asked_for(step: Step) -> None:
    step.pressure.relieve()
    assert step.asked == [10, 0]
    assert all(value.storage is None for value in step.values)
