"""Times of kernels are matched with the ops of the recorded step, also where saved tensors are away from the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from pooch.profiler import device_times
from pooch.profiler.device_times import device_slot_times_ms
from pooch.profiler.offload import OffloadStore, _Entry, saved_tensors_offloaded
from pooch.profiler.release import record_releases
from pooch.profiler.slots import StepAssembly
from pooch.profiler.step import record_step
from pooch.torchtools.memory_trace import live_tensors
from pooch.torchtools.tensors import storage_bytes

CPU = torch.device("cpu")
OP_MS, COPY_MS = 1.0, 1000.0
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


def job() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Sigmoid(), nn.Linear(1024, 8))
    rows = torch.rand(256, 64)
    return model, lambda: model(rows).square().sum()


@pytest.fixture(autouse=True)
def copies_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved tensors leave and come back by ops, as they do on a GPU, and not through a file."""

    def out(self: OffloadStore, storage: torch.UntypedStorage) -> _Entry:
        entry = _Entry(storage.nbytes(), storage.device)
        entry.host = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        return entry

    def back(self: OffloadStore, entry: _Entry) -> torch.UntypedStorage:
        assert entry.host is not None
        return entry.host.clone().untyped_storage()

    monkeypatch.setattr(OffloadStore, "_copy_out", out)
    monkeypatch.setattr(OffloadStore, "_copy_in", back)
    monkeypatch.setattr(device_times, "_kernels_ms", lambda event: COPY_MS if "clone" in event.name else OP_MS)


def assembly_of(model: nn.Module, forward: Callable[[], Tensor], mode: str) -> StepAssembly:
    store = OffloadStore() if mode == "offload" else None
    assembly = StepAssembly(record_step(forward, model, CPU, store), record_releases(forward, model))
    model.zero_grad(set_to_none=True)
    return assembly


@pytest.mark.parametrize("mode", ["run", "offload"])
def test_each_slot_gets_the_time_of_its_own_kernels_and_copies_count_nowhere(mode: str) -> None:
    model, forward = job()
    assembly = assembly_of(model, forward, mode)
    with saved_tensors_offloaded(model) if mode == "offload" else nullcontext():
        times_ms = device_slot_times_ms(forward, model, assembly)
    assert times_ms == [*[OP_MS] * (assembly.end - 1), 0.0]


def test_kernels_are_timed_with_saved_tensors_away() -> None:
    """What does not fit in-core must not be run in-core to time it."""
    model, forward = job()
    saved_bytes = 256 * 1024 * 4  # of each of the four activations of 256 x 1024
    lived: list[int] = []

    def watched() -> Tensor:
        loss = forward()
        floats = [t for t in live_tensors() if t.dtype == torch.float32]  # bytes that left are uint8
        lived.append(storage_bytes([t for t in floats if t.untyped_storage().nbytes() == saved_bytes]))
        return loss

    assembly = assembly_of(model, forward, "offload")
    device_slot_times_ms(watched, model, assembly)
    model.zero_grad(set_to_none=True)
    with saved_tensors_offloaded(model):
        assert device_slot_times_ms(watched, model, assembly) is not None
    in_core, offloaded = lived
    assert in_core >= 2 * saved_bytes
    assert offloaded < in_core


def test_another_step_than_the_recorded_one_has_no_times() -> None:
    model, forward = job()
    assembly = assembly_of(model, forward, "run")
    assert device_slot_times_ms(lambda: forward() * 2, model, assembly) is None
