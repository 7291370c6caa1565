"""Measuring the link takes no more memory than there is, least of all beside a step that just fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pooch.executor.engines import measurement
from pooch.executor.engines.cpu import CpuArena, CpuEngine, CpuTicket
from pooch.executor.engines.measurement import measure_link, with_step_shares
from pooch.executor.engines.protocol import Purpose
from pooch.ir import Link
from tests.executor.support import LINK

CPU = torch.device("cpu")
MIB = 2**20
PLENTY = 2**40


class Limited:
    """An arena from which copies come in another way."""

    def __init__(self, arena: CpuArena, copy_in: Callable[..., CpuTicket]) -> None:
        self._arena, self.copy_in = arena, copy_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)


class Sizes(CpuEngine):
    """Notes the room that is taken for copies, and has no more device memory than `most_bytes` for what comes back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.taken: list[int] = []
        self.most_bytes, self.asked = PLENTY, threading.Event()

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> CpuArena:
        self.taken.append(size_bytes)
        self.asked.clear()
        arena = super().open_arena(size_bytes)
        return cast(CpuArena, Limited(arena, partial(self.fill, arena.copy_in)))

    def fill(self, copy_in: Callable[..., CpuTicket], storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        self.asked.set()
        if storage.nbytes() > self.most_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return copy_in(storage, offset_bytes)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Sizes]:
    made = Sizes(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take no time to speak of, in the same proportions."""
    monkeypatch.setattr(measurement, "LARGE_BYTES", 16 * 2**16)
    monkeypatch.setattr(measurement, "_LEAST_BYTES", 2**16)
    monkeypatch.setattr(measurement, "is_limited", lambda: False)


def beside(engine: Sizes, time_step: Callable[..., tuple[float, float]], spare_bytes: int) -> Link | None:
    return with_step_shares(LINK, engine, CPU, [(1.0, 1.0)], time_step, spare_bytes)


def a_step(between: Callable[[], None]) -> tuple[float, float]:
    between()
    return 1.0, 1.0


@pytest.mark.parametrize(("spare_bytes", "copy_bytes"), [(PLENTY, 2**20), (3 * 2**20 - 1, 2**18), (3 * 2**16, 2**16)])
def test_copies_beside_a_step_fit_into_what_it_leaves(engine: Sizes, spare_bytes: int, copy_bytes: int) -> None:
    assert beside(engine, a_step, spare_bytes) is not None
    assert engine.taken == [2 * copy_bytes]


def test_a_step_that_leaves_nothing_is_not_timed_beside_copies(engine: Sizes) -> None:
    def step(between: Callable[[], None]) -> tuple[float, float]:
        raise AssertionError("it would run out of memory")

    assert beside(engine, step, 3 * 2**16 - 1) is None
    assert engine.taken == []


def test_copies_get_smaller_where_memory_runs_out_all_the_same(engine: Sizes) -> None:
    steps: list[int] = []

    def step(between: Callable[[], None]) -> tuple[float, float]:
        steps.append(engine.taken[-1])
        if len(steps) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return a_step(between)

    assert beside(engine, step, PLENTY) is not None
    assert steps == [2 * 2**20, 2 * 2**18, 2 * 2**16]


def test_memory_that_runs_out_in_the_copies_is_no_failure_either(
    engine: Sizes, capfd: pytest.CaptureFixture[str]
) -> None:
    """They run in a thread of their own."""
    engine.most_bytes = 2**16

    def step(between: Callable[[], None]) -> tuple[float, float]:
        between()
        assert engine.asked.wait(60)
        return 1.0, 1.0

    assert beside(engine, step, PLENTY) is not None
    assert engine.taken == [2 * 2**20, 2 * 2**18, 2 * 2**16]
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_the_step_that_is_not_about_memory_is_told(engine: Sizes) -> None:
    def step(between: Callable[[], None]) -> tuple[float, float]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        beside(engine, step, PLENTY)


@pytest.mark.parametrize(("free", "copy_bytes"), [(PLENTY, 2**20), (6 * 2**18, 2**18), (0, 2**16)])
def test_measuring_a_link_takes_at_most_half_of_what_is_free(
    engine: Sizes, free: int, copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "free_bytes", lambda device: free)
    products: list[int] = []
    noise = measurement.noise

    def noted(size_bytes: int, device: torch.device) -> torch.Tensor:
        products.append(size_bytes)
        return noise(size_bytes, device)

    monkeypatch.setattr(measurement, "noise", noted)
    measure_link(engine, CPU, shares=True)
    assert engine.taken == [4 * copy_bytes]
    assert max(products) == (4 * MIB if free == PLENTY else 2**18)


@pytest.mark.parametrize(("room", "copy_bytes"), [(PLENTY, 2**20), (3 * 2**18, 2**18), (0, 2**16)])
def test_measuring_a_link_keeps_to_the_room_that_it_is_given(engine: Sizes, room: int, copy_bytes: int) -> None:
    measure_link(engine, CPU, room_bytes=room)
    assert engine.taken == [4 * copy_bytes]
