from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.executor import mode
from pooch.executor.planned_values import PlannedValues
from pooch.executor.step import Step
from pooch.torchtools import watch
from tests.executor.native_mutations import SOURCES_VARIABLE, built_from


@pytest.fixture(scope="session", autouse=True)
def mutated_sources() -> Iterator[None]:
    """The native watch is built from other sources where a mutation of it is tried."""
    folder = os.environ.get(SOURCES_VARIABLE)
    assert folder is None or watch.LIBRARY.loaded is None, "the mutation would not be tried"
    with nullcontext() if folder is None else built_from(Path(folder)):
        yield


@pytest.fixture(params=["native", "mode"])
def watched_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What watches planned steps: both have to do the same."""
    if request.param == "mode":
        monkeypatch.setattr(mode, "is_native", lambda _: False)
    elif watch.LIBRARY.get() is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")
    return str(request.param)


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


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is done in Python to values that a plan moves."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("copy_out", "free", "copy_in", "wait", "replay", "put", "drop", "hold", "released"):
        count(PlannedValues, name)
    count(Step, "read")
    return counted
