"""The order in which values leave: that of their scores, however few of them are looked at."""

from __future__ import annotations

import math
import random
from itertools import islice

import pytest

from benchmarks.decisions import LongStep
from pooch.machine import Value, candidates
from pooch.machine.away import Away
from pooch.machine.candidates import _BUCKETS_PER_OCTAVE, Candidates
from pooch.machine.eviction import priced_score
from pooch.simulator.modelled import ModelledMemory, ModelledStorage

TOLERANCE = 2 ** (1 / _BUCKETS_PER_OCTAVE)


class Saved:
    """Values whose costs are told, and how often each was asked for."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.random, self.asked = random.Random(seed), 0
        self.values: dict[Value, None] = {}
        self.costs_ms: dict[Value, float] = {}
        self.staying: set[Value] = set()
        self.candidates = Candidates(self.values, lambda value: value not in self.staying, self.cost_ms)
        memory = ModelledMemory()
        for number in range(1, count + 1):
            value = Value(number, None, ModelledStorage(memory, self.random.randint(1, 1000)))
            value.saved_at = number
            self.values[value] = None
            self.costs_ms[value] = self.random.choice((0.0, self.random.random(), 100 * self.random.random()))
            self.candidates.add(value)

    def cost_ms(self, value: Value) -> float:
        self.asked += 1
        return self.costs_ms[value]

    def score(self, value: Value, position: float) -> float:
        return priced_score(self.costs_ms[value] / value.size_bytes, position, value.saved_at)


@pytest.mark.parametrize("seed", range(20))
def test_values_come_in_the_order_of_their_scores_whatever_the_position(seed: int) -> None:
    saved = Saved(200, seed)
    for position in (200, 150, 20, 300):
        order = list(saved.candidates.cheapest(position))
        assert set(order) == set(saved.values)
        scores = [saved.score(value, position) for value in order]
        for place, score in enumerate(scores):
            assert score <= TOLERANCE * min(scores[place:]) + 1e-12


def test_a_price_that_has_grown_is_noticed_and_one_that_has_shrunk_is_told() -> None:
    saved = Saved(50)
    first = next(saved.candidates.cheapest(50))
    list(saved.candidates.cheapest(50))
    saved.costs_ms[first] = 1e9
    assert list(saved.candidates.cheapest(50))[-1] is first
    saved.costs_ms[first] = -1.0
    saved.candidates.add(first)
    assert next(saved.candidates.cheapest(50)) is first


def test_what_cannot_leave_now_is_looked_at_again_and_all_of_it_before_the_end() -> None:
    saved = Saved(300)
    saved.staying = set(islice(saved.values, 200))
    assert set(saved.candidates.cheapest(300)) == set(saved.values) - saved.staying
    released = next(iter(saved.staying))
    saved.staying.remove(released)
    assert released in list(saved.candidates.cheapest(300))


def test_what_nobody_has_told_of_is_found_when_nothing_else_is_left() -> None:
    saved = Saved(20)
    value = next(iter(saved.values))
    list(saved.candidates.cheapest(20))
    saved.candidates.discard(value)
    assert value in list(saved.candidates.cheapest(20))


def test_what_cannot_leave_in_any_way_does_not_come() -> None:
    saved = Saved(20)
    value = next(iter(saved.values))
    saved.costs_ms[value] = math.inf
    assert value not in list(saved.candidates.cheapest(20))
    saved.costs_ms[value] = 1.0
    assert value in list(saved.candidates.cheapest(20))


def test_nothing_is_kept_of_what_has_ended() -> None:
    saved = Saved(100)
    list(islice(saved.candidates.cheapest(100), 10))
    for value in saved.values:
        saved.candidates.discard(value)
    left = saved.candidates
    assert [len(each) for each in (left._entries, left._buckets, left._entering, left._staying)] == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [500, 2000, 8000])
def test_a_decision_asks_for_few_costs_however_many_values_there_are(count: int) -> None:
    saved = Saved(count)
    for position in range(count, count // 2, -1):  # a value leaves in each turn
        value = next(saved.candidates.cheapest(position))
        value.storage = None
    assert saved.asked <= 4 * count


def test_values_that_become_dearer_while_they_are_looked_at_are_scored_a_few_times_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, scored = Saved(2000), [0]

    def counted(price: float, position: float, saved_at: float) -> float:
        scored[0] += 1
        return priced_score(price, position, saved_at)

    list(saved.candidates.cheapest(2000))
    saved.costs_ms = {value: 2.0 * value.size_bytes for value in saved.values}  # dearer, and all in one bucket
    monkeypatch.setattr(candidates, "priced_score", counted)
    assert len(list(saved.candidates.cheapest(2000))) == 2000
    assert 2000 < scored[0] < 8 * 2000


@pytest.mark.parametrize("count", [300, 1200, 4800])
def test_costs_of_replays_are_computed_no_more_often_than_values_times_their_logarithm(count: int) -> None:
    step = LongStep(count)
    while step.evictions < count:
        step.run_op()
    while step.saved:
        step.read_op()
    saved = step.pressure.saves
    assert step.costs <= saved * math.log2(saved)


def test_what_is_away_is_found_by_the_order_of_saving() -> None:
    memory, away, values = ModelledMemory(), Away(), [Value(number, None) for number in range(100)]
    for value in random.Random(0).sample(values, 100):
        value.saved_at, value.size_bytes, value.is_copied = value.number + 1, 10, True
        away.add(value)
    assert [value.number for value in away.before(51, 5)] == [49, 48, 47, 46, 45]
    values[48].storage = ModelledStorage(memory, 10)
    assert [value.number for value in away.before(51, 5)] == [49, 47, 46, 45]
    away.discard(values[47])
    assert [value.number for value in away.before(51, 5)] == [49, 46, 45]


def test_what_the_tier_does_not_have_is_not_brought_back_ahead_of_need() -> None:
    away, values = Away(), [Value(number, None) for number in range(10)]
    for value in values:
        value.saved_at, value.size_bytes, value.is_copied = value.number + 1, 10, value.number % 3 == 0
        away.add(value)
    assert [value.number for value in away.before(11, 64)] == [9, 6, 3, 0]
    values[6].is_copied = False  # it came back, was written over, and was dropped again
    away.add(values[6])
    values[4].is_copied = True
    away.add(values[4])
    away.add(values[4])
    assert [value.number for value in away.before(11, 64)] == [9, 4, 3, 0]
    away.discard(values[4])
    away.discard(values[5])
    assert [value.number for value in away.before(11, 64)] == [9, 3, 0]
