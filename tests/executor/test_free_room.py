"""Sizes of files and blocks follow what is asked for, and what is asked for again and again is made once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.engines.free_room import IDLE
from pooch.executor.engines.spill_file import ALIGNMENT_BYTES, SpillFile
from pooch.executor.engines.streams import StreamEngine
from tests.executor.fake_streams import Machine, install

KIB = 1024
MIB = 2**20


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the spill files that are made, without the room for padding."""
    sizes: list[int] = []
    real = SpillFile.__init__

    def noted(file: SpillFile, directory: object, size_bytes: int) -> None:
        sizes.append(size_bytes - ALIGNMENT_BYTES)
        real(file, directory, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(SpillFile, "__init__", noted)
    return sizes


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CpuEngine]:
    engine = CpuEngine(tmp_path)
    yield engine
    engine.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    install(fake, monkeypatch)
    return fake


def a_step(engine: CpuEngine | StreamEngine, *sizes: int) -> None:
    """Room of these sizes at the same time."""
    for arena in [engine.open_arena(size) for size in sizes]:
        arena.close()


@pytest.mark.cpu
def test_after_a_large_plan_chunks_take_what_they_need(engine: CpuEngine, made: list[int]) -> None:
    a_step(engine, 64 * MIB)
    for _ in range(3):
        a_step(engine, MIB, MIB, MIB)
    assert made == [64 * MIB, MIB, MIB]  # the first chunk has the large file, which is there anyway
    assert engine.room.held_bytes == 66 * MIB


@pytest.mark.cpu
def test_room_that_is_no_longer_needed_in_its_size_is_given_up(engine: CpuEngine, made: list[int]) -> None:
    a_step(engine, 64 * MIB)
    for _ in range(2 * IDLE):
        a_step(engine, MIB)
    assert engine.room.held_bytes == MIB
    assert made == [64 * MIB, MIB]


@pytest.mark.cpu
@pytest.mark.parametrize("sizes", [(MIB,), (MIB, MIB, MIB), (4 * MIB, 64 * KIB), (64 * KIB, 4 * MIB, MIB)])
def test_equal_steps_make_their_files_once(sizes: tuple[int, ...], engine: CpuEngine, made: list[int]) -> None:
    for _ in range(3):
        a_step(engine, *sizes)
    settled = len(made)
    for _ in range(3 * IDLE):
        a_step(engine, *sizes)
    assert len(made) == settled
    assert engine.room.held_bytes <= 2 * sum(sizes)


@pytest.mark.cpu
def test_what_is_held_is_bounded_under_any_sizes(engine: CpuEngine) -> None:
    generator = random.Random(0)
    most_bytes = 0
    for _ in range(300):
        sizes = [generator.choice((4, 16, 64, 256, 1024)) * KIB for _ in range(generator.randint(1, 4))]
        most_bytes = max(most_bytes, sum(sizes))
        a_step(engine, *sizes)
        assert engine.room.held_bytes <= 3 * most_bytes
    for _ in range(2 * IDLE):
        a_step(engine, 4 * KIB)
    assert engine.room.held_bytes == 4 * KIB


@pytest.mark.cpu
def test_a_large_file_of_rare_copies_does_not_wait(engine: CpuEngine) -> None:
    engine.open_arena(64 * MIB, "copies").close()
    assert engine.room.held_bytes == 0


@pytest.mark.cpu
def test_a_small_file_of_copies_waits_beside_that_of_all_steps(engine: CpuEngine, made: list[int]) -> None:
    for _ in range(3):
        arenas = [engine.open_arena(4 * MIB, "step"), engine.open_arena(MIB, "copies")]
        for arena in arenas:
            arena.close()
    assert made == [4 * MIB, MIB]
    engine.close()
    assert engine.room.held_bytes == 0


def test_blocks_are_locked_in_the_size_that_is_asked_for(machine: Machine) -> None:
    engine = StreamEngine(torch.device("cpu"))
    a_step(engine, 64 * KIB)
    for _ in range(3):
        a_step(engine, 4 * KIB, 4 * KIB, 4 * KIB)
    assert machine.log == [("lock", 64 * KIB), ("lock", 4 * KIB), ("lock", 4 * KIB)]
    for _ in range(2 * IDLE):
        a_step(engine, 4 * KIB)
    assert ("unlock", 64 * KIB) in machine.log
    assert machine.races == []
    engine.close()
    assert machine.locked == {}
