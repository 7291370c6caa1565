"""Parts that could end the process, under `pooch.auto` and under plans, each kind in a process of its own."""

from __future__ import annotations

import pytest

from tests.autopilot.test_exotic import check as check_governed
from tests.executor.test_exotic import WAYS as PLANNED_WAYS
from tests.executor.test_exotic import check as check_planned
from tests.exotic_training import APART, outcomes_apart


@pytest.mark.parametrize("name", sorted(APART))
def test_any_part_trains_with_the_same_bits_and_the_rest_is_governed(name: str) -> None:
    outcomes = outcomes_apart(name)
    check_governed(name, outcomes["auto"])
    for way in PLANNED_WAYS:
        check_planned(way, outcomes[way])
