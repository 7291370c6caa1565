"""Training under an evictor, with what is needed to see that it did something."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.evictor import Evictor
from pooch.executor.live_bytes import CountedBytes
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.machine import CopySpeed
from tests.copy_costs import costing
from tests.counting import counting as counting
from tests.counting import the_allocator
from tests.executor.online.zoo import Found, Training

CPU = torch.device("cpu")


@contextmanager
def holding(budget_bytes: int = 2**60, engine: CpuEngine | None = None) -> Iterator[Evictor]:
    """An evictor, closed afterwards."""
    allocator = the_allocator()
    evictor = Evictor(budget_bytes, engine or CpuEngine(), CountedBytes(allocator), CPU)
    try:
        yield evictor
    finally:
        evictor.close()
        allocator.ask_for_room(False)


def copies_cost(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Make copies as good as free, or so slow that whatever can be replayed is."""
    for name, method in costing(lambda size_bytes: size_bytes * factor).items():
        monkeypatch.setattr(CopySpeed, name, method)


@dataclass
class Seen:
    """A training step and what it took. Bytes are above those from before the step."""

    found: Found
    peak_bytes: int
    missing_bytes: int
    stats: RunStats


def run_plainly(make: Callable[[], Training]) -> Seen:
    """Without an evictor."""
    with without_collector(), holding() as evictor:
        torch.manual_seed(5)
        train = make()
        start_bytes = evictor.live.now()
        evictor.live.reset_peak()
        found = train(_nothing)
        return Seen(found, evictor.live.peak() - start_bytes, 0, RunStats())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def run_online(
    make: Callable[[], Training], budget_bytes: int, engine: CpuEngine | None = None, *, replays: bool = True
) -> Seen:
    """Under an evictor that holds a budget above what is live before the step."""
    with without_collector(), holding(engine=engine) as evictor:
        torch.manual_seed(5)
        train = make()
        start_bytes = evictor.live.now()
        evictor.set_budget(start_bytes + budget_bytes)
        stats = RunStats()
        evictor.begin_step(stats)

        @contextmanager
        def region() -> Iterator[Step]:
            step = Step(evictor, replays=replays)
            with following(step):
                yield step

        found = train(region)
        peak_bytes = evictor.live.peak() - start_bytes
        evictor.set_budget(2**60)
        return Seen(found, peak_bytes, evictor.missing_bytes, stats)


@contextmanager
def without_collector() -> Iterator[None]:
    """What is freed inside is freed by reference counting."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
