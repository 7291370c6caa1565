"""The search for the largest size: right wherever the need never falls, and quick where it is nearly affine."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooch.api.batch_search.line_search import largest_within


class Asked:
    """A need that counts its questions."""

    def __init__(self, need: Callable[[int], float]) -> None:
        self.need = need
        self.indices: list[int] = []

    def __call__(self, index: int) -> float:
        self.indices.append(index)
        return self.need(index)


def straight(index: int) -> float:
    return 100 + 7.3 * index


def exhaustive(needs: list[float], room: float) -> int | None:
    fitting = [index for index, need in enumerate(needs) if need <= room]
    return max(fitting, default=None)


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 80), first=st.lists(st.integers(0, 90), max_size=3))
def test_it_finds_what_asking_everything_finds(seed: int, length: int, first: list[int]) -> None:
    random = Random(seed)
    needs = sorted(random.uniform(0, 100) ** random.choice((1, 3)) for _ in range(length))
    room = random.choice([-1.0, random.uniform(0, 100), random.choice(needs), 1e9])
    asked = Asked(needs.__getitem__)
    assert largest_within(asked, room, first, most=length - 1) == exhaustive(needs, room)
    assert len(asked.indices) == len(set(asked.indices))


@pytest.mark.parametrize("room", [150.0, 1_000.0, 123_456.0, 9_000_000.0])
def test_a_straight_line_takes_few_questions(room: float) -> None:
    asked = Asked(straight)
    assert largest_within(asked, room, (0, 1)) == min(math.floor((room - 100) / 7.3), 2**20)
    assert len(asked.indices) <= 12  # of which most go into walking out from 0 and 1 in jumps


def test_a_start_in_the_right_region_saves_most_of_them() -> None:
    asked = Asked(straight)
    assert largest_within(asked, 20_000, (1000, 2001)) == 2726
    assert len(asked.indices) == 4  # the two, the answer, and the one after it


@pytest.mark.parametrize("power", [0.5, 2.0, 3.0])
def test_a_bent_line_takes_more_but_still_few(power: float) -> None:
    needs = [100 + index**power for index in range(4000)]
    for share in (0.01, 0.3, 0.9):
        asked = Asked(needs.__getitem__)
        room = share * needs[-1]
        assert largest_within(asked, room, (0, 1), most=3999) == exhaustive(needs, room)
        assert len(asked.indices) <= 25


def test_it_says_when_nothing_fits_and_stops_at_the_end() -> None:
    assert largest_within(lambda index: 5.0 + index, 4.0, (7, 9)) is None
    assert largest_within(lambda index: 0.0, 4.0, (0, 1), most=100) == 100
