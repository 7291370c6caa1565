"""What no plan moves is read natively as long as it is there, and by the step where something is to come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.records import Handle
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.machine.lock import StepLock
from pooch.machine.pressure import REACH
from pooch.torchtools import watch
from tests.executor.online.support import copies_cost, holding, without_collector

pytestmark = pytest.mark.cpu
LAYERS = 150
Forward = Callable[[nn.Parameter], Tensor]


def _chain(weight: nn.Parameter) -> Tensor:
    rows = weight
    for _ in range(LAYERS):
        rows = (rows * rows.sin()).tanh()
    return rows.sum()


@pytest.fixture
def read_in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of the values that the step reads, in their order."""
    if watch.LIBRARY.get() is None:
        pytest.skip("there is no native watch")
    positions: list[int] = []
    original = Step.read

    def read(step: Step, packed: Handle) -> Tensor:
        positions.append(packed.value.saved_at)
        return original(step, packed)

    monkeypatch.setattr(Step, "read", read)
    return positions


@contextmanager
def _step(forward: Forward, weight: nn.Parameter) -> Iterator[tuple[Evictor, Step, list[Tensor]]]:
    """A step after its forward pass, all of whose values may leave and none has left."""
    with without_collector(), holding() as evictor:
        evictor.begin_step(RunStats())
        step = Step(evictor)
        with following(step):
            losses = [forward(weight)]
        with step.lock:
            step.let_kept_leave()
        yield evictor, step, losses


def _gradient_of(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _gradient_of_plain_training() -> Tensor:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    _chain(weight).backward()
    return _gradient_of(weight)


def test_values_that_are_there_are_read_and_end_natively(
    read_in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(StepLock, "end", lambda lock, value: ended.append(value.number))
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    with _step(_chain, weight) as (evictor, step, losses):
        saved = len(step.owner.saved)
        assert saved == len(evictor.saved_keys()) == 2 * LAYERS
        losses.pop().backward()
        assert read_in_python == ended == []
        assert evictor._position == 1, "the backward pass has come to what was saved first"
        assert step.owner.saved == {}
        assert not evictor.has_values
    assert torch.equal(_gradient_of(weight), _gradient_of_plain_training())


def test_what_has_left_is_read_by_the_step_and_brought_back_ahead_of_need(
    read_in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_cost(monkeypatch, 1e-9)
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    with _step(_chain, weight) as (evictor, step, losses):
        values = list(step.owner.saved.values())
        with step.lock:
            away = [value.saved_at for value in values[100:120] if evictor._evict(value)]
        near = {at for place in away for at in range(place, place + REACH + 1)}
        assert len(away) == 20
        losses.pop().backward()
        assert set(away) <= set(read_in_python) <= near
        assert read_in_python[0] == max(near)
        assert evictor.stats.late_swaps < len(away), "the rest came ahead of need"
        assert not evictor.has_values
    assert torch.equal(_gradient_of(weight), _gradient_of_plain_training())


def test_what_has_to_be_made_again_is_read_by_the_step_and_nothing_else(
    read_in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_cost(monkeypatch, 1e9)
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    with _step(_chain, weight) as (evictor, step, losses):
        with step.lock:
            away = [value.saved_at for value in list(step.owner.saved.values())[100:120] if evictor._evict(value)]
        losses.pop().backward()
        assert len(away) == 20
        assert evictor.stats.recomputed_ops == 30, "and 10 products in between, which nothing has saved"
        assert read_in_python == [max(away)], "the rest has come on the way to it"
    assert torch.equal(_gradient_of(weight), _gradient_of_plain_training())


def test_what_was_changed_since_it_was_saved_is_not_read_natively_either(read_in_python: list[int]) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    kept: list[Tensor] = []

    def forward(weight: nn.Parameter) -> Tensor:
        kept.append(weight * 2)
        return (kept[0] * kept[0].sin()).sum()

    with _step(forward, weight) as (_, _step_of_it, losses):
        with torch.no_grad():
            kept[0].mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses.pop().backward()
        assert read_in_python, "it tells of the change"


def test_an_end_that_comes_while_the_step_is_locked_waits(read_in_python: list[int]) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64))
    with _step(_chain, weight) as (evictor, step, losses):
        with step.lock:
            losses.clear()
            assert evictor.has_values
            assert step.owner.saved
        assert not evictor.has_values
        assert step.owner.saved == {}
        assert read_in_python == []
