"""A storage that gets other memory while it is copied: the copy is that of what it held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pooch.executor.engines.cpu import CpuEngine
from pooch.torchtools import moving_memory
from tests.executor.copiers import use_copier

MIB = 2**20
MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "shared by a file": lambda tensor: tensor.untyped_storage()._share_filename_cpu_(),
    "made larger": lambda tensor: tensor.untyped_storage().resize_(16 * MIB),
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
    "made larger by an op": lambda tensor: tensor.resize_(16 * MIB),
}


@pytest.mark.cpu
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("which", ["native", "Python"])
def test_a_copy_under_way_is_that_of_what_was_there(
    which: str, move: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_copier(which, monkeypatch)
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4 * 8 * MIB)
    try:
        for number in range(3):
            tensor = torch.full((8 * MIB,), number, dtype=torch.uint8)
            ticket = arena.copy_out(tensor.untyped_storage(), number * 8 * MIB)
            MOVES[move](tensor)
            assert ticket.is_done()
            torch.full((8 * MIB,), 255, dtype=torch.uint8)  # takes the memory that was freed
        for number in range(3):
            back = torch.empty(8 * MIB, dtype=torch.uint8)
            arena.copy_in(back.untyped_storage(), number * 8 * MIB).wait()
            assert bool((back == number).all())
    finally:
        arena.close()
        engine.close()


def test_nothing_stands_in_once_no_engine_is_there(tmp_path: Path) -> None:
    others = len(moving_memory._LISTENERS)
    engine = CpuEngine(tmp_path)
    assert len(moving_memory._LISTENERS) == others + 1
    assert hasattr(torch.UntypedStorage.resize_, "__wrapped__")
    engine.close()
    assert len(moving_memory._LISTENERS) == others
    if not others:
        assert not hasattr(torch.UntypedStorage.resize_, "__wrapped__")
