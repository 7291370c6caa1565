"""The memory trace beside the counters of the real caching allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.ir import Profile
from pooch.torchtools.checksums import CHECKSUM_BYTES, checksum
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import MemoryTracer, quiet_collector
from tests.executor.support import quick_profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MIB = 2**20
MOST_ERROR = 0.005


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def lets_outputs_go() -> tuple[nn.Module, Callable[[], Tensor]]:
    """`nn.Sequential` drops each output between two ops; none of these is saved twice."""
    blocks = [m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardtanh())]
    model = nn.Sequential(*blocks).cuda()
    images = torch.rand(16, 16, 64, 64, device="cuda")
    return model, lambda: model(images).square().mean()


class FreesBetweenNodes(torch.autograd.Function):
    """Its backward pass returns a gradient that is let go of after the node, and not by an operator."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return gradient * 2 + rows * 0


def frees_between_nodes() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Linear(256, 256).cuda()
    rows = torch.rand(16384, 256, device="cuda")

    def forward() -> Tensor:
        hidden = model(rows)
        for _ in range(6):
            hidden = FreesBetweenNodes.apply(hidden) + hidden.sin()
        return hidden.sum()

    return model, forward


JOBS = {"outputs let go": lets_outputs_go, "frees between nodes": frees_between_nodes}


def measured_peak(model: nn.Module, forward: Callable[[], Tensor]) -> MemoryMeter:
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    with MemoryMeter(torch.device("cuda", torch.cuda.current_device())) as meter:
        forward().backward()
    model.zero_grad(set_to_none=True)
    return meter


@pytest.mark.parametrize("mode", ["run", "offload"])
@pytest.mark.parametrize("job", JOBS)
def test_the_predicted_in_core_peak_is_the_measured_one(job: str, mode: str) -> None:
    model, forward = JOBS[job]()
    profile = quick_profile(forward, model, mode=mode)
    measured = measured_peak(model, forward)
    assert profile.sizes == "allocated"
    assert profile.peak_bytes == pytest.approx(measured.peak_bytes, rel=MOST_ERROR)
    assert 0 <= measured.rounding_bytes < measured.peak_bytes <= measured.reserved_bytes


@pytest.mark.parametrize("job", JOBS)
def test_nothing_of_a_step_is_lost_by_the_trace(job: str) -> None:
    _model, forward = JOBS[job]()
    forward().backward()  # gradients exist, and libraries have taken what they keep
    device = torch.device("cuda", torch.cuda.current_device())
    tracer = MemoryTracer(device)
    with quiet_collector():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tracer.start()
        forward().backward()
        trace = tracer.stop()
    assert sum(event.size_bytes for event in trace.events) == torch.cuda.memory_allocated() - before
    assert trace.peak_bytes == torch.cuda.max_memory_allocated() - before
    freed = [event for event in trace.events if event.size_bytes < 0]
    assert all(event.pointer for event in trace.events)
    assert len(freed) > 10


@pytest.mark.parametrize("job", JOBS)
def test_a_plan_keeps_the_bytes_that_it_was_asked_for(job: str) -> None:
    model, forward = JOBS[job]()
    profile: Profile = quick_profile(forward, model)
    plan = pooch.plan(profile, "min", region="step")
    torch.cuda.empty_cache()
    with pooch.apply(plan, model) as run, MemoryMeter(torch.device("cuda", 0)) as meter:
        with run.step():
            loss = forward()
        loss.backward()
    assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    assert meter.peak_bytes - meter.rounding_bytes <= plan.predicted_peak_bytes + CHECKSUM_BYTES
    assert plan.predicted_peak_bytes == pytest.approx(meter.peak_bytes, rel=MOST_ERROR, abs=2 * MIB)


def test_a_block_that_is_not_split_counts_whole_and_was_asked_for_in_part() -> None:
    torch.cuda.init()
    before = torch.cuda.memory_stats()
    with MemoryMeter(torch.device("cuda", torch.cuda.current_device())) as meter:
        tensor = torch.empty(11 * MIB + MIB // 2, dtype=torch.uint8, device="cuda")
    asked_for_bytes = meter.peak_bytes - meter.rounding_bytes
    assert asked_for_bytes - before["requested_bytes.all.current"] == tensor.numel()
    assert 0 <= meter.peak_bytes - before["allocated_bytes.all.current"] - tensor.numel() <= MIB


@pytest.mark.parametrize("size_mib", [4, 64])
def test_a_checksum_takes_next_to_no_memory(size_mib: int) -> None:
    tensor = torch.ones(size_mib * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checksum(tensor.untyped_storage())
    assert torch.cuda.max_memory_allocated() - before <= CHECKSUM_BYTES
