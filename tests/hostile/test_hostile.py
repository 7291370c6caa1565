"""Whatever a model does, it trains to the same bits under Pooch, or is refused in one line before it trains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.hostile.cases import CASES
from tests.hostile.harness import WAYS, Judge, Outcome
from tests.hostile.process import outcomes_apart

pytestmark = pytest.mark.cpu
ALONE = [name for name, case in CASES.items() if case.is_alone]
NAMES = [
    pytest.param(name, marks=pytest.mark.xdist_group("hostile, alone" if name in ALONE else f"hostile {name}"))
    for name in CASES
]


@cache
def _judge(name: str) -> Judge:
    return Judge(CASES[name])


@cache
def _apart() -> dict[tuple[str, str], Outcome]:
    return outcomes_apart(ALONE)


@cache
def outcome(name: str, way: str) -> Outcome:
    """Each case is run once in each way, however many tests ask."""
    return _apart()[name, way] if name in ALONE else _judge(name).outcome(way)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """What plain training gave is compared with every way, and would count as memory that is there in later tests."""
    yield
    _judge.cache_clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_plain_training(name: str, way: str) -> None:
    found = outcome(name, way)
    assert found.is_right(CASES[name]), f"{name} under {way}: {found}; {CASES[name].why}"


@pytest.mark.parametrize("name", NAMES)
def test_something_was_swapped_or_replayed_in_some_way(name: str) -> None:
    found = {way: outcome(name, way) for way in WAYS}
    was_put_to_the_test = any(each.moved_something or each.kind in ("refused", "same error") for each in found.values())
    assert was_put_to_the_test or CASES[name].moves_nothing, f"{name}: {found}"


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
    assert len({case.why for case in CASES.values()}) == len(CASES)
