"""Who leaves first and how: Pooch's rule by hand, and what a policy may change of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from pooch.ir import Link
from pooch.machine import Call, CopySpeed, EvictionPolicy, Pressure, Recipes, Value
from pooch.machine.eviction import OURS, distance, online_score
from pooch.machine.values import Place
from pooch.simulator.modelled import ModelledClock, ModelledCounters, ModelledMemory, ModelledStorage, ModelledTier

LINK = Link("a modelled tier", 0.0, 0.0, 10.0, 10.0)
NEVER = float("inf")


class Step:
    """Saved values of 10 bytes, a millisecond of copying each way, whose replays take what is told."""

    def __init__(
        self,
        costs_ms: Mapping[int, float],
        policy: EvictionPolicy = OURS,
        sizes_bytes: Mapping[int, int] | None = None,
        room_bytes: int | None = None,
    ) -> None:
        self.costs_ms, self.thread = dict(costs_ms), threading.get_ident()
        self.memory, self.counters = ModelledMemory(), ModelledCounters()
        self.tier = ModelledTier(ModelledClock(LINK), room_bytes)
        speed = CopySpeed("a modelled tier")
        speed.start_from(LINK)
        self.pressure = Pressure(0, self.memory, self.memory, self.tier, speed, self.counters, policy)
        self.left: list[int] = []
        self.pressure.store.on_move = lambda kind, value, _: self.left.append(value.number)
        self.values: dict[int, Value] = {}
        for number in costs_ms:
            size_bytes = (sizes_bytes or {}).get(number, 10)
            value = self.values[number] = Value(number, self, ModelledStorage(self.memory, size_bytes))
            self.pressure.save(value)

    def states(self) -> dict[int, str]:
        return {number: value.state for number, value in self.values.items()}

    def first_to_leave(self) -> int:
        self.pressure.make_room(1)
        return self.left[0]

    def take_place(self, size_bytes: int) -> Place | None:
        return self.tier.take(size_bytes)

    def replay_ms(self, number: int) -> float:
        return self.costs_ms[number]

    def make_again(self, number: int) -> ModelledStorage:
        return self.memory.new(10)

    def remember(self, value: Value) -> None:
        return

    def moved(self, value: Value) -> list[Value]:
        return []

    def gained(self, gained_ms: float) -> None:
        return

    def released(self, number: int) -> None:
        return


def test_scores_by_hand() -> None:
    assert distance(7, 3) == 4
    assert distance(3, 3) == 1
    assert online_score(10.0, 2, 5.0) == 1.0


@pytest.mark.parametrize(("replay_ms", "state"), [(1.5, "unmade"), (2.5, "away"), (NEVER, "away")])
def test_a_value_leaves_in_the_cheaper_way(replay_ms: float, state: str) -> None:
    step = Step({1: replay_ms})
    step.pressure.make_room(10)
    assert step.states() == {1: state}
    assert step.pressure.missing_bytes == 0


def test_what_the_tier_has_leaves_for_the_copy_back_alone() -> None:
    step = Step({1: NEVER})
    step.pressure.make_room(10)
    step.pressure.ensure(step.values[1])
    step.costs_ms[1] = 1.5
    step.pressure.make_room(10)
    assert step.states() == {1: "away"}
    assert (step.tier.copies_out, step.tier.copies_in) == (1, 1)


def test_what_can_leave_in_no_way_stays_and_what_is_missing_is_told() -> None:
    step = Step({1: NEVER, 2: 3.0}, room_bytes=0)
    step.pressure.make_room(20)
    assert step.states() == {1: "here", 2: "unmade"}, "2 would be copied if there were room"
    assert step.pressure.missing_bytes == 10


def test_large_values_that_are_read_late_leave_first() -> None:
    assert Step({1: 1.0, 2: 1.0, 3: 1.0}).first_to_leave() == 1
    assert Step({1: 1.0, 2: 1.0, 3: 1.0}, sizes_bytes={2: 20}).first_to_leave() == 2


def test_a_policy_that_may_not_copy_drops_and_leaves_the_rest() -> None:
    step = Step({1: 99.0, 2: NEVER, 3: 1.0}, EvictionPolicy(may_copy=False))
    step.pressure.make_room(30)
    assert step.states() == {1: "unmade", 2: "here", 3: "unmade"}
    assert (step.tier.copies_out, step.tier.in_use, step.pressure.missing_bytes) == (0, 0, 10)


def test_a_policy_that_may_not_drop_copies_and_leaves_the_rest() -> None:
    step = Step({1: 0.5, 2: 0.5}, EvictionPolicy(may_drop=False), room_bytes=10)
    step.pressure.make_room(20)
    assert step.states() == {1: "away", 2: "here"}
    assert step.pressure.missing_bytes == 10


def test_nothing_is_copied_ahead_under_a_policy_that_may_not_copy() -> None:
    for may_copy in (False, True):
        step = Step({1: NEVER, 2: NEVER}, EvictionPolicy(may_copy=may_copy))
        step.pressure.set_budget(20)
        step.pressure.write_ahead()
        assert step.tier.copies_out == (2 if may_copy else 0)


def test_the_score_of_a_policy_decides_and_equals_leave_as_they_were_saved() -> None:
    step = Step({1: 1.0, 2: 1.0, 3: 1.0}, EvictionPolicy(lambda value, cost_ms, ahead: value.number == 1))
    step.pressure.make_room(30)
    assert step.left == [2, 3, 1]


def test_a_score_that_has_grown_is_computed_again() -> None:
    def grows(value: Value, cost_ms: float, ahead: float) -> float:
        return value.number + (10.0 if value.number == 2 and step.left else 0.0)

    step = Step({1: 1.0, 2: 1.0, 3: 1.0}, EvictionPolicy(grows))
    step.pressure.make_room(30)
    assert step.left == [1, 3, 2]


def test_a_sample_is_drawn_before_each_that_leaves() -> None:
    seen: list[list[int]] = []

    def last_two(values: list[Value]) -> list[Value]:
        seen.append([value.number for value in values])
        return values[-2:]

    step = Step(dict.fromkeys((1, 2, 3, 4), 1.0), EvictionPolicy(sample=last_two))
    step.pressure.make_room(40)
    assert step.left == [3, 2, 1, 4]
    assert seen == [[1, 2, 3, 4], [1, 2, 4], [1, 4], [4]]


def test_what_is_clean_is_dropped_before_anybody_waits_for_a_copy_under_way() -> None:
    # GIVEN three values in the tier and back, and two more that are being copied
    step = Step(dict.fromkeys((1, 2, 3, 4, 5), NEVER))
    for number in (1, 2, 3):
        step.pressure._evict(step.values[number])
        step.pressure.ensure(step.values[number])
    step.pressure.set_budget(50)
    step.pressure.write_ahead()
    assert step.states() == {1: "clean", 2: "clean", 3: "clean", 4: "leaving", 5: "leaving"}
    before_ms, step.left = step.tier.clock.stall_ms, []
    # WHEN room is made for as much as is clean THEN nobody waits
    step.pressure.make_room(30)
    assert step.left == [1, 2, 3]
    assert step.tier.clock.stall_ms == before_ms
    # WHEN more is needed THEN the copies are waited for, one after the other
    step.pressure.make_room(10)
    assert step.states()[4] == "away"
    assert step.tier.clock.stall_ms > before_ms
    assert step.pressure.missing_bytes == 0


def test_a_copy_that_has_ended_counts_as_cheap_as_one_that_was_waited_for() -> None:
    step = Step({1: NEVER, 2: 1.2})
    step.pressure.set_budget(20)
    step.pressure.write_ahead()
    assert step.states() == {1: "leaving", 2: "here"}
    step.tier.clock.compute(100.0)
    step.pressure.make_room(10)
    assert step.left == [1], "1 ms to bring it back, instead of 1.2 ms to replay the other one"
    assert step.tier.clock.stall_ms == 0.0


def test_a_source_that_the_backward_pass_reads_before_is_not_counted_on() -> None:
    """It is let go of then, so what made it runs again as well."""
    step = Step({})
    for number, size_bytes in ((1, 30), (2, 10)):
        value = step.values[number] = Value(number, step, ModelledStorage(step.memory, size_bytes))
        value.saved_at = 3 - number  # 1 is made first, but saved after 2
    recipes = Recipes(step.values, step, step.pressure.speed)  # type: ignore[arg-type]
    recipes.add(Call(None, (), (1,), 20.0))
    recipes.add(Call(None, (1,), (2,), 0.5))
    step.is_banned = lambda call, number: False  # type: ignore[attr-defined]
    assert recipes.replay_ms(2) == 20.5
    step.values[1].saved_at = 0.5  # type: ignore[assignment]
    recipes.moved(step.values[1])
    assert recipes.replay_ms(2) == 0.5
