"""A budget that is a share of the in-core peak, which is counted while values leave and come back."""

from __future__ import annotations

import random

import pytest

from pooch.machine.growing import GrowingBudget
from pooch.machine.values import Value
from pooch.simulator.modelled import ModelledMemory


def valued(number: int, size_bytes: int) -> Value:
    value = Value(number, None)
    value.size_bytes = size_bytes
    return value


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_a_step_of_which_nothing_leaves(seed: int) -> None:
    rng = random.Random(seed)
    live, plain = ModelledMemory(), ModelledMemory()
    for counted in (live, plain):
        counted.take(1000)
    growing = GrowingBudget(live, 0.5)
    here, away, most_live_bytes = list[Value](), list[Value](), 1000
    for number in range(300):
        match rng.choice(["make", "make", "temporary", "leave", "come", "end"]):
            case "make":
                here.append(valued(number, rng.randrange(1, 100)))
                live.take(here[-1].size_bytes)
                plain.take(here[-1].size_bytes)
            case "temporary":
                size_bytes = rng.randrange(1, 500)
                for counted in (live, plain):
                    counted.take(size_bytes)
                most_live_bytes = max(most_live_bytes, live.now())
                for counted in (live, plain):
                    counted.take(-size_bytes)
            case "leave" if here:
                away.append(here.pop(rng.randrange(len(here))))
                live.take(-away[-1].size_bytes)
                growing.left(away[-1])
            case "come" if away:
                here.append(away.pop(rng.randrange(len(away))))
                growing.comes(here[-1])
                live.take(here[-1].size_bytes)
            case "end" if here + away:
                value = rng.choice(here + away)
                if value in away:
                    away.remove(value)
                    growing.comes(value)
                else:
                    here.remove(value)
                    growing.comes(value)  # told as well, and of no account
                    live.take(-value.size_bytes)
                plain.take(-value.size_bytes)
        most_live_bytes = max(most_live_bytes, live.now())
        if rng.random() < 0.2:
            assert growing.peak_bytes == plain.peak()
    assert growing.peak_bytes == plain.peak() >= most_live_bytes
    assert growing.live_peak_bytes == most_live_bytes
    assert growing.size_bytes() == int(0.5 * plain.peak())


def test_what_is_only_thought_to_be_needed_does_not_count() -> None:
    live = ModelledMemory()
    live.take(100)
    growing = GrowingBudget(live, 0.5)
    value = valued(1, 60)
    live.take(60)
    live.take(-60)
    growing.left(value)
    assert growing.size_bytes(200) == 130
    assert growing.size_bytes() == 80
