from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used


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
def deterministic_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """What runs on a GPU runs on kernels that give the same bits each time."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def decide_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny activations are decided on too."""
    monkeypatch.setattr("pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES", 1)
