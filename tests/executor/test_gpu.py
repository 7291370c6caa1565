"""What only a GPU can show: streams, the caching allocator, capture. Skipped visibly where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.api.guarding import Guard
from pooch.api.measure.hard_limit import SLACK_BYTES, limit_gpu
from pooch.errors import PlanMismatch, UsageError
from pooch.executor import apply_plan
from pooch.executor.engines import pinned
from pooch.executor.engines.measurement import measure_link
from pooch.executor.engines.pinned import PinnedBlock
from pooch.executor.engines.streams import StreamEngine
from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.snapshot import StepSnapshot
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.executor.verification import PROOFS
from pooch.profiler.pressure import NOTHING_STAYS, evicting, steps_under
from pooch.profiler.step import record_step
from pooch.torchtools import cuda_only
from pooch.torchtools.memory_meter import MemoryMeter
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, mixed, profile_job, quick_profile, tight_plan, train
from tests.executor.test_packed_copies import Attention, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LARGE_BYTES = 64 * 2**20


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def busy(milliseconds: int) -> None:
    """Keep the current stream computing, so that whatever does not wait for it is early."""
    torch.cuda._sleep(milliseconds * 10**6)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("kind", ["conv", "transformer", "unet"])
def test_five_steps_with_buffers_used_again(kind: str, own_stream: bool) -> None:
    plain, _ = train(make_job(kind, 2, "cuda"), None, steps=5)
    stream: Any = torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()
    with stream:
        job = make_job(kind, 2, "cuda")
        profile = profile_job(job)
        planned, stats = train(job, tight_plan(profile, mixed(profile)), steps=5)
    torch.cuda.synchronize()  # what was trained on one stream is compared on another
    assert stats is not None
    assert stats.swapped_in_bytes > 2**20
    assert stats.recomputed_ops > 0
    assert (stats.late_swaps, stats.mismatches) == (0, 0)
    assert_same(plain, planned)


def test_masks_and_constants_come_back_whole() -> None:
    """A card's copies pack nothing, and profiles of one say so: a plan would count on fewer bytes."""

    def job() -> tuple[nn.Module, Callable[[], Tensor]]:
        torch.manual_seed(0)
        model, inputs = Attention().cuda(), torch.randn(8, 128, 32).cuda()
        return model, lambda: model(inputs).square().mean()

    expected = trained(*job())
    model, forward = job()
    profile = quick_profile(forward, model)
    plan = tight_plan(profile, all_of(profile, "swap", "model"), "model")
    with apply_plan(plan, model) as run:
        assert trained(model, forward) == expected
    copied = [profile.values[action.target] for action in plan.schedule.actions if action.kind == "copy_out"]
    assert [value.dtype for value in copied].count("bool") == 2  # the causal mask, and what dropout keeps
    assert not any(value.packs for value in profile.activations)
    assert (profile.link.packed_out_bytes_per_ms, profile.link.packed_in_bytes_per_ms) == (0.0, 0.0)
    assert run.stats.swapped_out_bytes == sum(value.size_bytes for value in copied)
    assert run.stats.spared_bytes == 0


def test_what_a_copy_still_fills_goes_to_nobody_else() -> None:
    device = torch.device("cuda", 0)
    engine = StreamEngine(device)
    arena = engine.open_arena(LARGE_BYTES)
    value = torch.full((LARGE_BYTES,), 7, dtype=torch.uint8, device=device)
    arena.copy_out(value.untyped_storage(), 0).wait()
    arena.copy_in(torch.UntypedStorage(LARGE_BYTES, device=device), 0)  # its ticket and its storage are let go of
    other = torch.full((LARGE_BYTES,), 99, dtype=torch.uint8, device=device)  # not where the copy is going to
    torch.cuda.synchronize()
    assert bool((other == 99).all())
    arena.close()
    engine.close()


def test_copies_wait_for_a_slow_producer_and_reads_for_copies() -> None:
    device = torch.device("cuda", 0)
    engine = StreamEngine(device)
    for fill in range(1, 4):
        arena = engine.open_arena(LARGE_BYTES)
        busy(20)
        value = torch.full((LARGE_BYTES,), fill, dtype=torch.uint8, device=device)
        arena.copy_out(value.untyped_storage(), 0).wait()
        del value
        noise = torch.full((LARGE_BYTES,), 99, dtype=torch.uint8, device=device)  # most likely in the same room
        back = torch.UntypedStorage(LARGE_BYTES, device=device)
        arena.copy_in(back, 0).wait()
        assert bool((torch.empty(0, dtype=torch.uint8, device=device).set_(back) == fill).all())
        del back, noise
        arena.close()
    engine.close()


def test_a_step_is_repeated_whose_model_has_buffers_on_two_devices() -> None:
    model = nn.Linear(4, 4).cuda()
    model.register_buffer("steps", torch.zeros(3))
    model.register_buffer("mean", torch.ones(5, device="cuda"))
    engine = StreamEngine(torch.device("cuda", 0))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    snapshot = StepSnapshot(model, engine, torch.device("cuda", 0))
    for buffer in model.buffers():
        buffer.add_(1)
    snapshot.restore()
    snapshot.close()
    engine.close()
    assert_same(before, dict(model.named_buffers()))


def test_stalls_and_the_step_are_timed_by_the_device() -> None:
    device = torch.device("cuda", 0)
    engine = StreamEngine(device)
    arena = engine.open_arena(LARGE_BYTES)
    value = torch.ones(LARGE_BYTES, dtype=torch.uint8, device=device)
    arena.copy_out(value.untyped_storage(), 0).wait()  # nothing to compute beside it
    arena.close()
    assert 0 < arena.clock.stall_ms <= arena.clock.step_ms
    arena = engine.open_arena(LARGE_BYTES)
    ticket = arena.copy_out(value.untyped_storage(), 0)
    engine.out_stream.synchronize()
    busy(20)
    ticket.wait()  # done long ago
    arena.close()
    assert arena.clock.stall_ms < arena.clock.step_ms / 2
    engine.close()


@contextmanager
def waits_refused() -> Iterator[None]:
    """PyTorch raises where one of its operations makes the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_guarded_step_makes_the_host_wait_for_nothing() -> None:
    """With buffers, and with gradients that accumulate from the second step on.

    The first steps look whether anything writes over what was copied, which the host waits for; later ones do not.
    """
    torch.manual_seed(1)
    model, rows = nn.Sequential(nn.Linear(640, 640), nn.BatchNorm1d(640), nn.Tanh()).cuda(), torch.rand(64, 640).cuda()
    profile = quick_profile(lambda: model(rows).sum(), model)
    plan = tight_plan(profile, all_of(profile, "swap"))
    with Guard(plan, model, lambda target: plan, measured_steps=0) as guard:
        for step in range(PROOFS + 3):
            with waits_refused() if step >= PROOFS else nullcontext():
                guard.step(lambda: model(rows).sum())
        assert guard.run.stats.swapped_in_bytes > 0
        assert guard.run.stats.step_ms > 0
        assert guard.repairs == []


def test_pinned_blocks_are_pinned_and_can_be_had_again() -> None:
    for _ in range(2):
        block = PinnedBlock(5000, torch.device("cuda", 0))
        assert all(part.is_pinned() for part in block.parts)
        block.unlock()
        assert not any(part.is_pinned() for part in block.parts)
        del block


@pytest.mark.parametrize("refused", ["all", "all but the first part"])
def test_where_memory_cannot_be_locked_the_rest_is_ordinary(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(make_job("conv", 2, "cuda"), None, steps=3)
    job = make_job("conv", 2, "cuda")
    profile = profile_job(job)
    if refused == "all":
        monkeypatch.setattr(cuda_only, "lock_pages", lambda *_: 2)
    else:
        lock, left = cuda_only.lock_pages, iter([True])
        monkeypatch.setattr(pinned, "PART_BYTES", 8192)
        monkeypatch.setattr(cuda_only, "lock_pages", lambda *given: lock(*given) if next(left, False) else 2)
    with pytest.warns(UserWarning, match="cannot be page-locked"):
        planned, stats = train(job, tight_plan(profile, all_of(profile, "swap")), steps=3)
    assert stats is not None
    assert stats.swapped_in_bytes > 0
    assert_same(plain, planned)


def test_the_rate_of_ordinary_memory_is_measured() -> None:
    device = torch.device("cuda", 0)
    engine = StreamEngine(device, "never")
    link = measure_link(engine, device, room_bytes=3 * 2**22)
    engine.close()
    assert link.tier == "host memory that is not page-locked"
    assert min(link.out_bytes_per_ms, link.in_bytes_per_ms) > 0


def test_a_plan_keeps_its_peak_and_says_what_is_reserved() -> None:
    job = make_job("conv", 2, "cuda")
    train(job, None, steps=1)  # cuBLAS and cuDNN take what they keep
    profile = profile_job(job)
    budget_bytes = profile.persistent_bytes + int(0.75 * (profile.peak_bytes - profile.persistent_bytes))
    plan = pooch.plan(profile, budget_bytes, region="step", time_limit_s=5)  # what libraries keep cannot be moved
    with apply_plan(plan, job.model) as run, MemoryMeter(job.device) as meter:
        with run.step():
            loss = job.forward()
        loss.backward()
        stats = run.stats
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0
    assert meter.peak_bytes <= 1.02 * plan.budget_bytes  # large blocks are split only if more than 1 MiB is left
    assert stats.reserved_bytes is not None
    assert stats.reserved_bytes >= meter.peak_bytes


def test_the_card_made_small() -> None:
    device = torch.device("cuda", 0)
    gc.collect()
    limit_bytes = limit_gpu(device, torch.cuda.memory_allocated() + 2**20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(limit_bytes + SLACK_BYTES, dtype=torch.uint8, device=device)


def test_out_of_memory_in_mid_step_leaves_nothing_behind() -> None:
    job = make_job("conv", 2, "cuda")
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    with apply_plan(plan, job.model) as run:
        train_once(job, run)
        gc.collect()
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            run_out_of_memory(job, run)
        gc.collect()
        train_once(job, run)
        gc.collect()
        assert torch.cuda.memory_allocated() == before


def run_out_of_memory(job: Any, run: Any) -> None:
    with run.step():
        job.forward()
        torch.empty(2**50, dtype=torch.uint8, device="cuda")


def train_once(job: Any, run: Any) -> None:
    job.optimizer.zero_grad()
    with run.step():
        loss = job.forward()
    loss.backward()


def test_a_planned_step_cannot_be_captured() -> None:
    job = make_job("conv", 1, "cuda")
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(UsageError, match="CUDA graph")
    with apply_plan(plan, job.model) as run, refused, torch.cuda.graph(graph), run.step():
        job.forward()
    torch.cuda.synchronize()


def test_convolutions_are_not_replayed_where_cudnn_chooses_by_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("conv", 1, "cuda")
    replaying = tight_plan(*with_all(job))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(PlanMismatch, match="switch it off"):
        apply_plan(replaying, job.model)
    careful = tight_plan(*with_all(job))
    replayed = {a.target - careful.first_slot for a in careful.schedule.actions if a.kind == "replay"}
    assert replayed
    assert not any(careful.expected[op].fingerprint.startswith("aten.convolution") for op in replayed)


def with_all(job: Any) -> tuple[Any, Any]:
    profile = profile_job(job)
    return profile, all_of(profile, "recompute")


@pytest.mark.skipif(not torch.backends.cudnn.enabled, reason="cuDNN is off")
def test_dropout_inside_of_cudnn_is_swapped_and_not_replayed() -> None:
    plain, _ = train(make_job("recurrent", 2, "cuda"), None)
    job = make_job("recurrent", 2, "cuda")
    profile = profile_job(job)
    recurrent = [op for op in profile.ops if op.name.startswith("aten._cudnn_rnn.")]
    assert recurrent
    assert all("state of its own" in (op.refusal or "") for op in recurrent)
    planned, stats = train(job, tight_plan(profile, mixed(profile)))
    assert stats is not None
    assert stats.swapped_in_bytes > 0
    assert_same(plain, planned)


class WithHelperOnTheCpu(nn.Module):
    """Saves a value on the CPU on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, data: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(data))
        return torch.exp(hidden.cpu()).to(data.device) * hidden


def test_values_on_the_cpu_stay_there() -> None:
    def gradients(planned: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, data = WithHelperOnTheCpu().cuda(), torch.ones(256, 64, device="cuda")
        profile = quick_profile(lambda: model(data).sum(), model)
        helper = next(
            value for value in profile.values if "another device (cpu)" in (value.fixed or "") and value.saved
        )
        assert helper.release < helper.first_unpack  # the program lets go of it before autograd does
        plan = tight_plan(profile, mixed(profile) if planned else {})
        with apply_plan(plan, model) as run, run.step():
            loss = model(data).sum()
        loss.backward()
        assert (run.stats.swapped_out_bytes > 0) == planned
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert_same(gradients(False), gradients(True))


@pytest.mark.parametrize("way", ["recorded", "copied", "replayed"])
def test_values_on_the_cpu_stay_there_where_nothing_else_stays(way: str) -> None:
    """As the seed of an attention kernel, which the host reads in the backward pass: as device memory that crashed."""

    def gradients(evictor: Evictor | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, data = WithHelperOnTheCpu().cuda(), torch.ones(256, 64, device="cuda")
        if evictor is not None and way == "recorded":
            record_step(lambda: model(data).sum(), model, evictor)
        elif evictor is not None:
            evictor.begin_step(RunStats())
            with steps_under(evictor) if way == "copied" else following(Step(evictor)):
                loss = model(data).sum()
            loss.backward()
        else:
            model(data).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with evicting(torch.device("cuda", 0), NOTHING_STAYS) as evictor:
        under_pressure = gradients(evictor)
        assert evictor.stats.swapped_out_bytes + evictor.stats.recomputed_ops > 0
    assert_same(gradients(None), under_pressure)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_model_on_the_second_device() -> None:
    plain, _ = train(make_job("conv", 2, "cuda:1"), None)
    job = make_job("conv", 2, "cuda:1")
    profile = profile_job(job)
    planned, stats = train(job, tight_plan(profile, mixed(profile)))
    assert torch.cuda.current_device() == 0
    assert stats is not None
    assert stats.swapped_in_bytes > 0
    assert_same(plain, planned)
