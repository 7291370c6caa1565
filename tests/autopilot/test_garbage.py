"""Reference cycles that Python has not collected take no part of the budget."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pooch
from pooch.autopilot.garbage import Garbage
from tests.live_before import live_bytes

WIDTH, ROWS = 128, 1024
ACTIVATION_BYTES = 4 * WIDTH * ROWS


@pytest.fixture(autouse=True)
def _collected_by_nothing_else() -> Iterator[None]:
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*threshold)


def garbage() -> weakref.ref[torch.Tensor]:
    tensor = torch.zeros(12 * ACTIVATION_BYTES // 4)
    cycle: list[object] = [tensor]
    cycle.append(cycle)
    return weakref.ref(tensor)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def test_what_a_step_leaves_in_cycles_is_collected_where_it_is_in_the_way() -> None:
    model = network()
    budget = live_bytes() + 16 * ACTIVATION_BYTES
    with pooch.auto(model, budget, quiet=True) as auto:
        for _ in range(4):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            garbage()
            summary = auto.summary()
    assert summary.steps_over_budget == 0, summary


def test_what_is_garbage_before_the_budget_is_held_is_not_told_of() -> None:
    model = network()
    budget = live_bytes() + 16 * ACTIVATION_BYTES
    for _ in range(3):
        garbage()
    told: list[str] = []
    with pooch.auto(model, budget, tell=told.append):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    assert not [line for line in told if "were live before" in line], told


class Live:
    """Counts the bytes that are live, so many less after each collection."""

    def __init__(self, freed_bytes: int) -> None:
        self.freed_bytes, self.asked = freed_bytes, 0

    def now(self) -> int:
        self.asked += 1
        return 2**20 - (self.asked % 2 == 0) * self.freed_bytes


@pytest.mark.parametrize(
    ("is_held", "freed_bytes", "expected"),
    [
        (False, 0, [0, 4, 20, 84]),
        (True, 0, [0, 4, 20, 84]),
        (False, 100, [0, 4, 20, 84]),
        (True, 100, list(range(100))),
        (False, 2**17, list(range(100))),
    ],
)
def test_it_is_collected_in_each_step_as_long_as_that_helps(
    is_held: bool, freed_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, step = [], 0
    monkeypatch.setattr(gc, "collect", lambda: collected.append(step))
    live: Any = Live(freed_bytes)
    waiting = Garbage(live)
    for step in range(100):
        waiting.collect(step)
        waiting.collect(step)
        waiting.step_ends(is_held=is_held)
    assert collected == expected


def test_programs_that_collect_by_themselves_are_left_alone() -> None:
    model = network()
    left = garbage()
    before_bytes = live_bytes()
    gc.disable()
    try:
        with pooch.auto(model, before_bytes // 2, quiet=True):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            assert left() is not None
    finally:
        gc.enable()
