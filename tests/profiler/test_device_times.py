"""Times of kernels are matched with the ops of the recorded step, also where saved tensors are away from the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.executor.engines.cpu import CpuArena
from pooch.profiler import device_times
from pooch.profiler.device_times import device_slot_times_ms
from pooch.profiler.pressure import EVERYTHING_STAYS, NOTHING_STAYS, evicting, saved_tensors_away
from pooch.profiler.slots import StepAssembly
from pooch.profiler.step import record_step
from pooch.torchtools.memory_trace import live_tensors
from pooch.torchtools.tensors import storage_bytes

CPU = torch.device("cpu")
OP_MS, COPY_MS = 1.0, 1000.0
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")
BUDGETS = pytest.mark.parametrize("budget_bytes", [EVERYTHING_STAYS, NOTHING_STAYS], ids=["run", "offload"])


def job() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Sigmoid(), nn.Linear(1024, 8))
    rows = torch.rand(256, 64)
    return model, lambda: model(rows).square().sum()


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Saved tensors leave and come back by ops, as they do on a GPU, and not through a file alone."""
    made: list[str] = []

    def with_an_op(name: str) -> Any:
        plain = getattr(CpuArena, name)

        def copy(self: CpuArena, storage: torch.UntypedStorage, offset_bytes: int) -> Any:
            torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            made.append(name)
            return plain(self, storage, offset_bytes)

        return copy

    for name in ("copy_out", "copy_in"):
        monkeypatch.setattr(CpuArena, name, with_an_op(name))
    monkeypatch.setattr(device_times, "_kernels_ms", lambda event: COPY_MS if "clone" in event.name else OP_MS)
    return made


def assembly_of(model: nn.Module, forward: Callable[[], Tensor], budget_bytes: int) -> StepAssembly:
    with evicting(CPU, budget_bytes) as evictor:
        assembly = StepAssembly(record_step(forward, model, evictor))
    model.zero_grad(set_to_none=True)
    return assembly


@BUDGETS
def test_each_slot_gets_the_time_of_its_own_kernels_and_copies_count_nowhere(
    budget_bytes: int, copies: list[str]
) -> None:
    model, forward = job()
    assembly = assembly_of(model, forward, budget_bytes)
    copies.clear()
    with saved_tensors_away(CPU) if budget_bytes == NOTHING_STAYS else nullcontext():
        times_ms = device_slot_times_ms(forward, model, assembly)
    assert set(copies) == ({"copy_out", "copy_in"} if budget_bytes == NOTHING_STAYS else set())
    assert times_ms == [*[OP_MS] * (assembly.end - 1), 0.0]


def test_kernels_are_timed_with_saved_tensors_away() -> None:
    """What does not fit in-core must not be run in-core to time it."""
    model, forward = job()
    saved_bytes = 256 * 1024 * 4  # of each of the four activations of 256 x 1024
    lived: list[int] = []

    def watched() -> Tensor:
        loss = forward()
        floats = [t for t in live_tensors() if t.dtype == torch.float32]
        lived.append(storage_bytes([t for t in floats if t.untyped_storage().nbytes() == saved_bytes]))
        return loss

    assembly = assembly_of(model, forward, NOTHING_STAYS)
    device_slot_times_ms(watched, model, assembly)
    model.zero_grad(set_to_none=True)
    with saved_tensors_away(CPU):
        assert device_slot_times_ms(watched, model, assembly) is not None
    in_core, offloaded = lived
    assert in_core >= 2 * saved_bytes
    assert offloaded < in_core


def test_another_step_than_the_recorded_one_has_no_times() -> None:
    model, forward = job()
    assembly = assembly_of(model, forward, EVERYTHING_STAYS)
    assert device_slot_times_ms(lambda: forward() * 2, model, assembly) is None
