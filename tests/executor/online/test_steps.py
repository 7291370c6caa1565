"""Steps under the online policy: bitwise those of plain training, at every budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from pooch.executor.leaving import FixedPlace
from pooch.machine import Value
from pooch.profiler.pressure import NOTHING_STAYS, evicting, steps_under
from tests.executor.online.support import copies_cost, run_online, run_plainly
from tests.executor.online.zoo import WIDTH, ZOO, Found, Region, Training
from tests.executor.support import assert_same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]
SHARES = (0.0, 0.4, 0.7)  # of the plain peak; nothing fits into the first, so that all leaves that can
# Steps whose plain peak is mostly what can leave, and not gradients, copies for the test and what single ops need.
FIT = {
    "convolutions", "attention", "recurrent", "dropout", "own results", "views", "several outputs", "several forwards",
    "overlapping steps", "changing buffer", "running statistics", "checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("way", ["copied", "replayed", "either", "unrecorded"])
@pytest.mark.parametrize("kind", ZOO)
def test_steps_are_those_of_plain_training(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plainly(ZOO[kind])
    if way in ("copied", "replayed"):
        copies_cost(monkeypatch, 1e-9 if way == "copied" else 1e9)
    swapped_bytes = replayed_ops = floor_bytes = 0
    for share in SHARES:
        budget_bytes = int(share * plain.peak_bytes)
        seen = run_online(ZOO[kind], budget_bytes, replays=way != "unrecorded")
        assert_same(plain.found, seen.found)
        assert seen.peak_bytes <= budget_bytes + seen.missing_bytes
        floor_bytes = floor_bytes or seen.peak_bytes
        assert seen.peak_bytes <= max(budget_bytes, floor_bytes)
        assert seen.missing_bytes == 0 or share < 0.7 or kind not in FIT
        swapped_bytes += seen.stats.swapped_out_bytes
        replayed_ops += seen.stats.recomputed_ops
    assert swapped_bytes or way in ("replayed", "either")
    assert replayed_ops or way != "replayed"
    assert swapped_bytes or replayed_ops
    assert not replayed_ops or way != "unrecorded"


def _other_data() -> Training:
    weight, inputs = nn.Parameter(torch.randn(64, WIDTH)), torch.randn(64, WIDTH, requires_grad=True)

    def train(region: Region) -> Found:
        with region():
            loss = (inputs * weight).square().sum()
        weight.data = weight.detach() * 3
        loss.backward()
        return {"inputs": _gradient(inputs), "weight": _gradient(weight)}

    return train


def _memory_of_others() -> Training:
    pixels, scale = numpy.random.RandomState(0).rand(64, WIDTH), nn.Parameter(torch.ones(64, WIDTH).double())

    def train(region: Region) -> Found:
        with region():
            loss = (torch.from_numpy(pixels) * scale).square().sum()
        pixels[:] *= 3
        loss.backward()
        return {"scale": _gradient(scale)}

    return train


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


@pytest.mark.parametrize("make", [_other_data, _memory_of_others])
def test_what_plain_training_reads_late_is_read_late(make: Callable[[], Training]) -> None:
    """Autograd holds such tensors as they are, so the backward pass reads what they hold by then."""
    seen = run_online(make, 0, replays=False)
    assert_same(run_plainly(make).found, seen.found)
    assert seen.stats.swapped_out_bytes > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_lies_on_another_device_than_the_budgets_stays(device: str) -> None:
    data = torch.ones(256, 256, requires_grad=True)
    with evicting(torch.device("cpu"), NOTHING_STAYS) as evictor:
        evictor.device = torch.device(device)
        with steps_under(evictor):
            loss = data.exp().sin().sum()
        loss.backward()
        assert (evictor.stats.swapped_out_bytes > 0) == (device == "cpu")
    assert data.grad is not None
    assert torch.equal(data.grad, data.detach().exp().cos() * data.detach().exp())


def test_what_was_read_ahead_may_leave_again_once_its_copy_has_ended() -> None:
    """Nobody has waited for it, and the thread that copied does not hold its memory."""
    with evicting(torch.device("cpu"), NOTHING_STAYS) as evictor:
        arena = evictor.engine.open_arena(4096)
        value = Value(1, None, torch.UntypedStorage(4096))
        evictor.store.start_out(value, FixedPlace(arena, 0, evictor.engine.health), evictor.stats)
        evictor.store.finish_out(value, evictor.stats)
        evictor.store.drop(value)
        evictor.store.start_in(value, evictor.stats)
        deadline_s = time.monotonic() + 20
        while value.is_held_elsewhere(evictor.memory):
            assert time.monotonic() < deadline_s
        assert value.state == "returning"
        evictor.store.finish_in(value, evictor.stats)
        arena.close()
