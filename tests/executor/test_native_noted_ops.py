"""A step without a plan tells which ops it had, whether they are recorded or not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pooch.executor.mode import following
from pooch.executor.native_watch import NotedOps
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.torchtools import watch
from tests.executor.online.support import copies_cost, holding, without_collector

pytestmark = pytest.mark.cpu

ROWS = 2**12


@pytest.fixture(autouse=True)
def _natively() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip("there is no native watch")


def ops_of(
    forward: Callable[[Tensor], Tensor], *, replays: bool, budget_bytes: int = 2**60, notes_ops: bool = True
) -> tuple[int, RunStats]:
    """Run a step, and return what tells its ops and what was done in it."""
    with without_collector(), holding() as evictor:
        rows = torch.ones(ROWS, requires_grad=True)
        evictor.set_budget(evictor.live.now() + budget_bytes)
        stats = RunStats()
        evictor.begin_step(stats)
        step = Step(evictor, replays=replays)
        with following(step, notes_ops=notes_ops):
            loss = forward(rows)
        ops = step.cursor.ops
        loss.backward()
        evictor.set_budget(2**60)
    return ops, stats


def ordinary(rows: Tensor) -> Tensor:
    for _ in range(8):
        rows = rows.sin().exp().cos()
    return rows.sum()


@pytest.mark.parametrize("replays", [True, False])
def test_it_is_the_same_in_steps_that_do_the_same_and_in_no_others(replays: bool) -> None:
    ops, _ = ops_of(ordinary, replays=replays)
    assert ops
    assert ops == ops_of(ordinary, replays=not replays)[0]
    assert ops != ops_of(lambda rows: ordinary(rows.exp()), replays=replays)[0]
    assert ops != ops_of(lambda rows: ordinary(rows).exp(), replays=replays)[0]


@pytest.mark.parametrize("replays", [True, False])
def test_their_order_counts(replays: bool) -> None:
    ops, _ = ops_of(lambda rows: rows.sin().exp().sum(), replays=replays)
    assert ops != ops_of(lambda rows: rows.exp().sin().sum(), replays=replays)[0]


@pytest.mark.parametrize("replays", [True, False])
def test_views_and_numbers_that_are_read_do_not_count(replays: bool) -> None:
    def with_more(rows: Tensor) -> Tensor:
        rows = rows.view(2, -1).t().t().flatten()
        assert rows.detach()[0].item() == 1
        return ordinary(rows)

    assert ops_of(with_more, replays=replays)[0] == ops_of(ordinary, replays=replays)[0]


def test_what_is_replayed_in_its_midst_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_twice(rows: Tensor) -> Tensor:
        last = rows
        for _ in range(24):
            last = last.sin()
        loss = last.sum()
        torch.autograd.grad(loss, rows, retain_graph=True)
        return loss

    ops, stats = ops_of(read_twice, replays=True)
    assert not stats.recomputed_ops
    copies_cost(monkeypatch, 1e6)
    found, stats = ops_of(read_twice, replays=True, budget_bytes=12 * 4 * ROWS)
    assert stats.recomputed_ops
    assert found == ops


@pytest.mark.parametrize("replays", [True, False])
def test_of_ops_in_several_threads_nothing_is_told(replays: bool) -> None:
    def in_two(step: Step, rows: Tensor) -> Tensor:
        watch = NotedOps(step.cursor)
        with ThreadPoolExecutor(1) as other:
            other.submit(watch.put).result()
            try:
                return ordinary(rows)
            finally:
                other.submit(watch.take_away).result()

    with holding() as evictor:
        evictor.begin_step(RunStats())
        step = Step(evictor, replays=replays)
        with following(step, notes_ops=True):
            in_two(step, torch.ones(ROWS, requires_grad=True))
        assert step.cursor.ops == 0


def test_a_step_that_copies_tells_them_only_where_it_is_asked() -> None:
    assert ops_of(ordinary, replays=False, notes_ops=False)[0] == 0
