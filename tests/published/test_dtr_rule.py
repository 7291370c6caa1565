"""DTR's score by hand, and its two ways to count what is evicted around a value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.machine import Value
from pooch.published.policies.dtr import dtr, dtr_eq
from pooch.published.policies.dtr_rule import (
    Dtr,
    EvictedClasses,
    Makings,
    Neighbourhood,
    dtr_score,
    evicted_neighbourhood,
    makings_of,
    reached,
)
from pooch.simulator.modelled import ModelledMemory, ModelledStorage
from tests.toys import ToyStep


def makings(parents: dict[int, tuple[int, ...]], costs_ms: dict[int, float] | None = None) -> Makings:
    children = {value: tuple(child for child in parents if value in parents[child]) for value in parents}
    return Makings(costs_ms or dict.fromkeys(parents, 1.0), parents, children)


def chain_of(costs_ms: list[float]) -> Makings:
    parents = {value: (value - 1,) if value else () for value in range(len(costs_ms))}
    return makings(parents, dict(enumerate(costs_ms)))


class Choosing:
    """A rule whose values were all accessed a millisecond ago, and have 10 bytes each, but for what is told."""

    def __init__(self, known: Makings, neighbourhood: Neighbourhood = "exact", *, samples: bool = False) -> None:
        self.now_ms = 0.0
        self.rule = Dtr(known, lambda: self.now_ms, neighbourhood, samples)
        for number in known.own_ms:
            self.rule.accessed(number)
        self.now_ms = 1.0

    def score(self, number: int, *, size_bytes: int = 10, cost_ms: float = 1.0) -> float:
        value = Value(number, None, ModelledStorage(ModelledMemory(), size_bytes))
        return self.rule.policy.score(value, cost_ms, 1.0)


def test_the_score_by_hand() -> None:
    assert dtr_score(2.0, 3.0, 4, 0.5) == 2.5


def test_dtr_drops_and_copies_nothing() -> None:
    policy = Choosing(chain_of([1.0])).rule.policy
    assert (policy.may_copy, policy.may_drop, policy.sample) == (False, True, None)


def test_what_is_made_from_what_follows_from_the_profile() -> None:
    # GIVEN 1 made of 0, an op that saves nothing, and 3 made of that and of 1
    step = ToyStep()
    (first,) = step.op([step.external(8)], [8], time_ms=1.0)
    (second,) = step.op([first], [8], saves=[first], time_ms=2.0)
    (between,) = step.op([second], [8], saves=[second], time_ms=3.0)
    (last,) = step.op([between, second], [8], saves_outputs=[0], time_ms=4.0)
    known = makings_of(Dataflow(step.build()))
    assert known.own_ms == {first: 1.0, second: 2.0, last: 7.0}
    assert known.parents == {first: (), second: (first,), last: (second,)}
    assert known.children == {first: (second,), second: (last,)}


def test_a_neighbourhood_ends_at_what_is_there() -> None:
    # GIVEN 0 - 1 - 2 - 3 - 4 - 5, of which 1, 2 and 4 are evicted
    chain, evicted = chain_of([1.0] * 6), {1, 2, 4}
    assert reached(chain.parents_of(3), chain.parents_of, evicted) == {1, 2}
    assert reached(chain.children_of(3), chain.children_of, evicted) == {4}
    assert evicted_neighbourhood(chain, 3, evicted) == {1, 2, 4}
    assert evicted_neighbourhood(chain, 0, evicted) == {1, 2}
    assert evicted_neighbourhood(chain, 5, evicted) == {4}


def test_an_exact_neighbourhood_leaves_out_siblings_and_classes_do_not() -> None:
    # GIVEN 1 and 2 made of 0, and 3 made of 1; 0 and 2 are evicted
    family = makings({0: (), 1: (0,), 2: (0,), 3: (1,)})
    classes = EvictedClasses()
    for value in (0, 2):
        classes.evict(value, 1.0, family.around(value))
    assert evicted_neighbourhood(family, 1, {0, 2}) == {0}
    assert classes.neighbourhood_ms(family.around(1)) == 2.0


def test_classes_cannot_split() -> None:
    chain, classes = chain_of([1.0] * 5), EvictedClasses()
    for value in (1, 2, 3):
        classes.evict(value, 1.0, chain.around(value))
    classes.restore(2)
    assert evicted_neighbourhood(chain, 0, {1, 3}) == {1}
    assert classes.neighbourhood_ms(chain.around(0)) == 2.0, "3 still counts as next to 1"
    assert classes.neighbourhood_ms(chain.around(2)) == 2.0, "one class, counted once"


@given(
    costs_ms=st.lists(st.integers(1, 50), min_size=2, max_size=15),
    order=st.randoms(use_true_random=False),
    share=st.floats(0, 1),
)
def test_on_a_chain_both_neighbourhoods_agree_as_long_as_nothing_comes_back(costs_ms, order, share) -> None:
    chain, classes = chain_of([float(cost) for cost in costs_ms]), EvictedClasses()
    leaving = list(range(len(costs_ms)))
    order.shuffle(leaving)
    evicted: set[int] = set()
    for value in leaving[: int(share * len(leaving))]:
        classes.evict(value, chain.own_ms[value], chain.around(value))
        evicted.add(value)
    for value in set(leaving) - evicted:
        exact_ms = sum(chain.own_ms[other] for other in evicted_neighbourhood(chain, value, evicted))
        assert classes.neighbourhood_ms(chain.around(value)) == exact_ms


@given(data=st.data(), count=st.integers(2, 10))
def test_classes_never_count_less_than_the_exact_neighbourhood(data: st.DataObject, count: int) -> None:
    parents = {i: tuple(data.draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else () for i in range(count)}
    graph, classes, evicted = makings(parents), EvictedClasses(), set[int]()
    for value in data.draw(st.lists(st.integers(0, count - 1), max_size=30)):
        if value in evicted:
            evicted.remove(value)
            classes.restore(value)
        else:
            evicted.add(value)
            classes.evict(value, graph.own_ms[value], graph.around(value))
        for other in set(range(count)) - evicted:
            assert classes.neighbourhood_ms(graph.around(other)) >= len(evicted_neighbourhood(graph, other, evicted))


@pytest.mark.parametrize("neighbourhood", ["exact", "eq"])
def test_dtr_drops_what_is_cheap_large_and_stale_and_stands_alone(neighbourhood: Neighbourhood) -> None:
    of = Choosing(chain_of([1.0] * 7 + [2.0, 1.0]), neighbourhood)
    usual = of.score(3)
    assert of.score(5) == usual
    assert of.score(3, size_bytes=20) < usual < of.score(7)
    assert of.score(3, cost_ms=float("inf"), size_bytes=99) == float("inf"), "it cannot be made again"
    of.rule.dropped(2)
    assert of.score(5) == usual < of.score(3), "3 now has an evicted neighbour"
    of.rule.made_again(2)
    assert of.score(3) == usual
    of.rule.accessed(5)
    of.now_ms = 2.0
    assert of.score(3) < of.score(5), "5 was accessed since"


def test_sampling_looks_at_the_root_of_their_number_and_at_nothing_small() -> None:
    rule = Choosing(chain_of([1.0] * 100), samples=True).rule
    memory = ModelledMemory()
    sizes = [10 if number < 50 else 100_000 for number in range(100)]
    everybody = [Value(number, None, ModelledStorage(memory, size)) for number, size in enumerate(sizes)]
    assert rule.policy.sample is not None
    drawn = [rule.policy.sample(everybody) for _ in range(40)]
    assert {len(sample) for sample in drawn} == {8}, "50 are large"
    assert min(value.number for sample in drawn for value in sample) >= 50, "the rest is below a hundredth of the mean"
    assert len({frozenset(value.number for value in sample) for sample in drawn}) > 5


def test_the_variants_count_neighbourhoods_in_their_own_way() -> None:
    # GIVEN 0, and 1 and 2 that are made of it; 0 and 2 are dropped, so 2 counts for 1 where directions are ignored
    family = Makings({0: 1.0, 1: 1.0, 2: 1.0, 3: 2.5}, {1: (0,), 2: (0,)}, {0: (1, 2)})
    for policy, first in ((dtr, 1), (dtr_eq, 3)):
        of = Choosing(family, policy.neighbourhood)
        of.rule.dropped(0)
        of.rule.dropped(2)
        assert min((1, 3), key=of.score) == first
