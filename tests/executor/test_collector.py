"""Python's collector comes as often as without Pooch, though what a step saves makes thousands of objects."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from tests.executor.online.support import holding

pytestmark = pytest.mark.cpu
SAVES = 6000


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


@contextmanager
def _collections() -> Iterator[Counter[int]]:
    """How often each generation is collected."""
    found = Counter[int]()

    def note(phase: str, facts: dict[str, int]) -> None:
        found[facts["generation"]] += phase == "start"

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def _train(evictor: Evictor, weight: nn.Parameter) -> None:
    evictor.begin_step(RunStats())
    step = Step(evictor)
    with following(step):
        rows = weight
        for _ in range(SAVES // 2):
            rows = rows.sin() * rows
    with step.lock:
        step.let_kept_leave()
    assert len(step.owner.saved) >= SAVES - 1
    rows.sum().backward()


def test_a_step_that_saves_much_is_not_collected_again_and_again(thresholds: tuple[int, int, int]) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 4))
    with holding() as evictor:
        with _collections() as first:
            _train(evictor, weight)
        with _collections() as second:
            _train(evictor, weight)
        assert first[0] >= 10, "nobody knew how much the first step would save"
        assert second[0] + second[1] + second[2] <= 2
        assert gc.get_threshold()[0] > SAVES
    assert gc.get_threshold() == thresholds


def test_what_the_program_sets_meanwhile_is_kept() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 4))
    with holding() as evictor:
        _train(evictor, weight)
        _train(evictor, weight)
        gc.set_threshold(500, 5, 5)
        evictor.begin_step(RunStats())
        assert gc.get_threshold()[0] > SAVES
        gc.set_threshold(0)
        evictor.begin_step(RunStats())
        assert gc.get_threshold()[0] == 0, "the collector is off"
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
