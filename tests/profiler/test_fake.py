"""A step profiled from fake tensors is the step that runs: same ops, same activations, same bytes at every point."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.errors import ProfileError
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from pooch.profiler import ProfileOptions
from pooch.profiler.fake.measured import MeasuredCosts
from pooch.profiler.fake.profiler import FakeSetting, profile_fake_step
from pooch.profiler.fake.world import FakeWorld
from pooch.profiler.hardware import describe_device
from pooch.workloads import Workload, WorkloadFactory
from tests.executor.nets import KINDS, Job, make_job
from tests.executor.support import (
    LINK,
    all_of,
    assert_same,
    mixed,
    moved_bytes,
    planned_replays,
    profile_job,
    quick_profile,
    tight_plan,
    train,
)
from tests.executor.test_peaks import NOISE, measured_peak, planned_at

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 2, "image_size": 64},
    "gpt2": {"batch_size": 2, "layers": 2, "sequence_length": 64, "width": 64, "heads": 2, "vocabulary": 500},
    "unet3d": {"batch_size": 1, "volume_size": 32},
    "lstm": {"batch_size": 4, "width": 64},
}


def fake_profile(
    forward: Callable[[], Tensor], model: nn.Module, optimizer: Any = None, world: FakeWorld | None = None
) -> Profile:
    setting = FakeSetting(describe_device(CPU), LINK, MeasuredCosts(CPU), world)
    return profile_fake_step(forward, model, optimizer, setting, ProfileOptions())


def fake_job_profile(job: Job) -> Profile:
    return fake_profile(job.forward, job.model, job.optimizer)


def small_workload(name: str) -> Callable[[], Workload]:
    pytest.importorskip({"gpt2": "transformers", "unet3d": "monai"}.get(name, "torch"))
    settings = dict(SMALL[name])
    return WorkloadFactory(name, batch_size=settings.pop("batch_size"), settings=settings)


def assert_same_step(fake: Profile, run: Profile) -> None:
    """All that planning and running take from a profile, but for times."""
    assert check_profile(fake) is None
    assert fake.mode == "fake"
    forward = fake.forward_ops
    assert [op.fingerprint for op in fake.ops[:forward]] == [op.fingerprint for op in run.ops[: run.forward_ops]]
    for one, other in zip(fake.values, run.values, strict=True):
        assert (one.id, one.label, one.shape, one.dtype) == (other.id, other.label, other.shape, other.dtype)
        assert (one.size_bytes, one.allocated_bytes) == (other.size_bytes, other.allocated_bytes), one.label
        assert (one.saved, one.fixed, one.producer, one.overwrites) == (
            other.saved,
            other.fixed,
            other.producer,
            other.overwrites,
        )
        assert one.touches == other.touches, one.label
        if forward > min(one.release, other.release):
            assert one.release == other.release
        else:
            assert (one.release == len(fake.ops)) == (other.release == len(run.ops))
    assert [op.reads for op in fake.ops[:forward]] == [op.reads for op in run.ops[:forward]]
    assert [op.refusal for op in fake.ops] == [
        None if i >= forward else run.ops[i].refusal for i in range(len(fake.ops))
    ]
    assert [v for _, ids in fake.anchors for v in ids] == [v for _, ids in run.anchors for v in ids]
    assert (fake.model_begin, fake.model_end, fake.model_signature) == (
        run.model_begin,
        run.model_end,
        run.model_signature,
    )
    # Beside the step itself, the account of a run counts tensors that happen to live, such as random states.
    above, run_above = fake.peak_bytes - fake.persistent_bytes, run.peak_bytes - run.persistent_bytes
    assert above == pytest.approx(run_above, rel=0.002)
    assert fake.persistent_bytes == pytest.approx(run.persistent_bytes, rel=0.01, abs=16384)


@pytest.mark.parametrize("name", SMALL)
def test_built_in_workloads_without_memory_are_those_that_run(name: str) -> None:
    factory = small_workload(name)
    world = FakeWorld()
    built = world.build(factory)
    assert all(world.owns(parameter) for parameter in built.model.parameters())
    fake = fake_profile(built.forward, built.model, built.optimizer, world)
    del built
    gc.collect()
    real = factory()
    assert_same_step(fake, quick_profile(real.forward, real.model, real.optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_live_models_too(kind: str) -> None:
    job = make_job(kind, 2)
    assert_same_step(fake_job_profile(job), profile_job(job))


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_model_stays_as_it_was(kind: str) -> None:
    job = make_job(kind)
    job.forward().backward()
    parameters, gradients = list(job.model.parameters()), [p.grad for p in job.model.parameters()]
    attributes = {name: dict(module.__dict__) for name, module in job.model.named_modules()}
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    random_state = torch.get_rng_state()
    fake_job_profile(job)
    assert all(now is then for now, then in zip(job.model.parameters(), parameters, strict=True))
    assert all(p.grad is g for p, g in zip(job.model.parameters(), gradients, strict=True))
    assert_same(before, dict(job.model.state_dict()))
    assert torch.equal(random_state, torch.get_rng_state())
    for name, module in job.model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is value for key, value in attributes[name].items())


@pytest.mark.parametrize("choose", ["mixed", "swap", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_fake_tensors_runs_bitwise_equal(kind: str, choose: Any) -> None:
    profile = fake_job_profile(make_job(kind))
    plan = tight_plan(profile, mixed(profile) if choose == "mixed" else all_of(profile, choose))
    plain, _ = train(make_job(kind), None)
    planned, stats = train(make_job(kind), plan, on_mismatch="error")
    assert_same(plain, planned)
    assert stats is not None
    assert (stats.late_swaps, stats.mismatches) == (0, 0)
    assert stats.swapped_out_bytes == moved_bytes(plan, profile, "copy_out")
    assert stats.emptied_bytes == moved_bytes(plan, profile, "empty")
    assert stats.emptied_bytes > 0 or choose == "recompute"
    assert stats.recomputed_ops == planned_replays(plan)
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0


@pytest.mark.usefixtures("without_floor")  # other tests of the process may hold tensors
@pytest.mark.parametrize("kind", ["conv", "recurrent"])
def test_a_plan_from_fake_tensors_keeps_its_budget(kind: str) -> None:
    job = make_job(kind, 2)
    profile = fake_job_profile(job)
    plan = planned_at(profile, 0.7, "step")
    peak = measured_peak(job, plan)
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)
    assert peak < 0.95 * profile.peak_bytes


class Sharing(nn.Module):
    """Gradients of one value meet from several readers, some of which share their gradient with others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        added = hidden + self.second(hidden)  # both sides get the same gradient: it must not be written to
        return added.sin() + hidden.cos() * added + hidden


def test_gradients_that_meet_take_the_memory_that_plain_training_takes() -> None:
    model, rows = Sharing(), torch.rand(512, 128)
    run = quick_profile(lambda: model(rows).sum(), model)
    fake = fake_profile(lambda: model(rows).sum(), model)
    sums = [op.name for op in fake.ops if op.name in ("aten::add", "aten::add_")]
    assert sums == [op.name for op in run.ops if op.name in ("aten::add", "aten::add_")]
    assert len(set(sums)) == 2  # in place and not
    above = [op.peak_bytes - fake.persistent_bytes for op in fake.ops]
    assert above == pytest.approx([op.peak_bytes - run.persistent_bytes for op in run.ops], abs=64)


class Reading(nn.Module):
    """Reads numbers back from tensors: from a range, or from its own data."""

    def __init__(self, reads_data: bool) -> None:
        super().__init__()
        self.weight, self.reads_data = nn.Parameter(torch.ones(4)), reads_data

    def forward(self, rows: Tensor) -> Tensor:
        dimensions = torch.arange(1, rows.ndim).tolist()
        positions = torch.arange(8) // 2
        positions.add_(1)
        if (positions[1:] - positions[:-1] > 1).any():
            raise AssertionError("the contents of the range were lost")
        if self.reads_data and rows.sum().item() > 0:
            rows = rows * 2
        return (rows * self.weight).sum(dimensions)


def test_contents_that_do_not_depend_on_data_can_be_read() -> None:
    model, rows = Reading(False), torch.rand(3, 4)
    profile = fake_profile(lambda: model(rows).sum(), model)
    assert [op.fingerprint for op in profile.ops] == [
        op.fingerprint for op in quick_profile(lambda: model(rows).sum(), model).ops
    ]


def test_reading_data_is_told_in_one_line() -> None:
    model, rows = Reading(True), torch.rand(3, 4)
    with pytest.raises(ProfileError, match="reads the contents of a tensor") as caught:
        fake_profile(lambda: model(rows).sum(), model)
    assert "\n" not in str(caught.value)
    assert type(model.weight) is nn.Parameter


def test_gradients_that_accumulate_count_from_the_start() -> None:
    job = make_job("conv", 2)
    plain = fake_job_profile(job)
    setting = FakeSetting(describe_device(CPU), LINK, MeasuredCosts(CPU))
    kept = profile_fake_step(job.forward, job.model, job.optimizer, setting, ProfileOptions(accumulate=True))
    gradient_bytes = sum(p.numel() * 4 for p in job.model.parameters())
    assert kept.persistent_bytes - plain.persistent_bytes == pytest.approx(gradient_bytes, rel=0.05)


def test_a_model_bigger_than_any_memory() -> None:
    def build() -> Workload:
        model = nn.Sequential(*[nn.Linear(1 << 17, 1 << 17) for _ in range(8)])  # 512 GiB of weights
        rows = torch.rand(64, 1 << 17)
        return Workload(model, lambda: model(rows).square().mean(), torch.optim.Adam(model.parameters()))

    from pooch.api.profiling import profile_workload
    from pooch.devices import find_device

    profile = profile_workload(build, device_model=find_device("H200"))
    assert profile.persistent_bytes > 3 * 2**39  # weights and Adam's two moments
    assert profile.peak_bytes > profile.persistent_bytes + 2**39  # gradients
    assert len(profile.activations) == 8
    assert profile.device.modelled
