"""What is small compared with the budget stays native in steps that copy, until nothing else is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.torchtools import watch
from tests.executor.online.support import holding, without_collector

LARGE, SMALL, LAYERS = 64 * 1024, 16, 6  # elements


@pytest.fixture(autouse=True)
def _native() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip("there is no native watch")


class Net(nn.Module):
    """Saves a small and a large tensor in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.linspace(0, 1, LARGE)), nn.Parameter(torch.linspace(0, 1, SMALL))

    def forward(self) -> Tensor:
        large, small = self.large + 0, self.small + 0
        for _ in range(LAYERS):
            small = small.sin()
            large = large.sin()
        return large.sum() + small.sum()


@contextmanager
def _copying(*, replays: bool = False) -> Iterator[tuple[Evictor, Step]]:
    """A step that has room for two of its large values, and copies the others."""
    with without_collector(), holding() as evictor:
        evictor.begin_step(RunStats())
        evictor.set_budget(evictor.live.now() + 5 * LARGE * 2)
        step = Step(evictor, replays=replays)
        yield evictor, step
        evictor.set_budget(2**60)


def _gradients(model: Net) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _sizes(step: Step) -> list[int]:
    return [value.size_bytes for value in step.owner.saved.values()]


def test_small_values_are_left_to_the_native_part_and_all_bits_are_the_same() -> None:
    plain, model = Net(), Net()
    plain().backward()
    with _copying() as (evictor, step):
        with following(step):
            loss = model()
        assert evictor.small_bytes > SMALL * 4
        assert set(_sizes(step)) == {LARGE * 4}
        positions = [value.saved_at for value in step.owner.saved.values()]
        assert positions == sorted(positions)
        assert positions[-1] >= 2 * LAYERS, "small ones count"
        loss.backward()
        assert step.stats.swapped_in_bytes >= 2 * LARGE * 4
    assert all(map(torch.equal, _gradients(plain), _gradients(model)))
    assert len(_gradients(model)) == 2


def test_small_values_leave_where_all_is_to_leave_and_come_back_with_the_same_bits() -> None:
    plain, model = Net(), Net()
    plain().backward()
    with _copying() as (evictor, step):
        with following(step):
            loss = model()
        with step.lock:
            evictor.make_room(2**40)
        assert _sizes(step).count(SMALL * 4) == LAYERS
        places = {value.saved_at: value.size_bytes for value in step.owner.saved.values()}
        in_order = [places[position] for position in sorted(places)]
        assert in_order == [SMALL * 4, LARGE * 4] * LAYERS
        assert step.stats.swapped_out_bytes >= LAYERS * (LARGE + SMALL) * 4
        loss.backward()
    assert all(map(torch.equal, _gradients(plain), _gradients(model)))


def test_steps_that_replay_know_of_small_values_which_replays_may_read() -> None:
    model = Net()
    with _copying(replays=True) as (_, step):
        with following(step):
            loss = model()
        assert SMALL * 4 in _sizes(step)
        loss.backward()


def test_a_small_value_that_ends_while_it_stays_is_not_registered_later() -> None:
    model = Net()
    with _copying() as (_, step):
        with following(step):
            losses = [model()]
        losses.clear()
        with step.lock:
            step.let_kept_leave()
        assert step.owner.saved == {}
