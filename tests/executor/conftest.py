from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> Iterator[None]:
    """What was imported is nobody's garbage: looking through it again for every profile takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def decide_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny activations are decided on too."""
    monkeypatch.setattr("pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES", 1)
