"""The scores by hand, and DTR's two ways to count what is evicted around a value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooch.analysis.eviction import (
    EvictedClasses,
    copy_cost_ms,
    distance,
    dtr_score,
    online_score,
    reached,
    replay_cost_ms,
)
from pooch.analysis.online.rules import Cheapest, Dtr, Evictable, Leaving, Makings, evicted_neighbourhood


def makings(parents: dict[int, tuple[int, ...]], costs_ms: dict[int, float] | None = None) -> Makings:
    children = {value: tuple(child for child in parents if value in parents[child]) for value in parents}
    return Makings(costs_ms or dict.fromkeys(parents, 1.0), parents, children)


def chain_of(costs_ms: list[float]) -> Makings:
    parents = {value: (value - 1,) if value else () for value in range(len(costs_ms))}
    return makings(parents, dict(enumerate(costs_ms)))


def there(value: int, **facts: object) -> Evictable:
    usual = {"size_bytes": 10, "can_drop": True, "out_ms": 1.0, "in_ms": 1.0, "staleness_ms": 1.0, "saved": value}
    return Evictable(value, **(usual | facts))  # type: ignore[arg-type]


def test_scores_by_hand() -> None:
    assert dtr_score(2.0, 3.0, 4, 0.5) == 2.5
    assert replay_cost_ms(2.0, 3.0) == 5.0
    assert copy_cost_ms(1.0, 2.0) == 3.0
    assert copy_cost_ms(1.0, 2.0, hidden_ms=2.5) == 0.5
    assert copy_cost_ms(1.0, 2.0, hidden_ms=9.0) == 0.0
    assert distance(7, 3) == 4
    assert distance(3, 3) == 1
    assert online_score(6.0, 3, 4.0) == 1.0


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
def test_dtr_drops_what_is_cheap_large_and_stale_and_stands_alone(neighbourhood) -> None:
    rule = Dtr(chain_of([1.0] * 9), neighbourhood)
    same = [there(value) for value in (3, 5)]
    assert rule.choose([*same, there(7, size_bytes=20)], 8) == Leaving(7, "recompute")
    assert rule.choose([*same, there(7, staleness_ms=2.0)], 8) == Leaving(7, "recompute")
    assert rule.choose([*same, there(7, can_drop=False, size_bytes=99)], 8) == Leaving(3, "recompute")
    rule.dropped(2)
    assert rule.choose(same, 8) == Leaving(5, "recompute"), "3 now has an evicted neighbour"
    rule.made_again(2)
    assert rule.choose(same, 8) == Leaving(3, "recompute")
    assert Dtr(chain_of([1.0, 5.0]), neighbourhood).choose([there(1), there(0)], 1) == Leaving(0, "recompute")
    assert rule.choose([there(1, can_drop=False)], 8) is None


def test_sampling_looks_at_the_root_of_their_number_and_at_nothing_small() -> None:
    rule = Dtr(chain_of([float(100 - value) for value in range(100)]), samples=True)
    everybody = [there(value, size_bytes=10 if value < 50 else 100_000) for value in range(100)]
    chosen = [rule.choose(everybody, 99) for _ in range(40)]
    values = {leaving.value for leaving in chosen if leaving is not None}
    assert min(values) >= 50, "the rest is below a hundredth of the mean"
    assert len(values) > 5, "the lowest score of all is rarely in the sample"


def test_ours_takes_the_cheaper_way_and_counts_missing_ancestors() -> None:
    rule = Cheapest(chain_of([1.5] * 9))
    assert rule.choose([there(5)], 8) == Leaving(5, "recompute"), "1.5 ms against 2 ms of copies"
    assert rule.choose([there(5, out_ms=0.0)], 8) == Leaving(5, "swap"), "the tier has it"
    assert rule.choose([there(5, can_drop=False)], 8) == Leaving(5, "swap")
    assert rule.choose([there(5, can_drop=False, out_ms=float("inf"))], 8) is None
    rule.dropped(4)
    assert rule.choose([there(5)], 8) == Leaving(5, "swap"), "3 ms against 2 ms"
    rule.made_again(4)
    assert rule.choose([there(5)], 8) == Leaving(5, "recompute")


def test_ours_prefers_large_values_that_are_read_late() -> None:
    rule = Cheapest(chain_of([1.0] * 9))
    assert rule.choose([there(5), there(6, size_bytes=20), there(7)], 8) == Leaving(6, "recompute")
    assert rule.choose([there(7), there(2), there(5)], 8) == Leaving(2, "recompute")
