"""A profile is consistent, agrees with the meter, and leaves the training state as it found it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.errors import ProfileError
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from pooch.profiler import ProfileOptions, profile_step
from tests.executor.nets import KINDS, make_job
from tests.executor.support import LINK, assert_same, profile_job, quick_profile


def test_a_workload_in_a_file_whose_name_is_no_text_can_be_saved(tmp_path: Path) -> None:
    job = make_job(KINDS[0])
    options = ProfileOptions(warmup=0, workload=os.fsdecode(b"train\xff.py:make"))
    profile = profile_step(job.forward, job.model, job.optimizer, LINK, options).profile
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert profile.workload.startswith("train")


@pytest.mark.parametrize("mode", ["run", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_consistent_and_survives_a_file(kind: str, mode: str, tmp_path: Path) -> None:
    profile = profile_job(make_job(kind), mode)
    assert check_profile(profile) is None
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert profile.mode == mode
    assert profile.model_begin == 0
    assert 0 < profile.model_end < profile.forward_ops
    for value in profile.activations:
        assert value.producer <= value.release < value.first_unpack <= value.death < len(profile.ops)
        assert value.allocated_bytes >= value.size_bytes
        assert value.id in profile.ops[value.producer].writes
    for op in profile.ops[: profile.forward_ops]:
        assert all(profile.values[i].producer < op.index for i in op.reads)
        assert all(profile.values[i].producer == op.index for i in op.writes)
    assert max(op.peak_bytes for op in profile.ops) == profile.peak_bytes
    assert sum(op.time_ms for op in profile.ops) == pytest.approx(profile.step_ms)


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_and_plain_steps_give_the_same_in_core_curve(kind: str) -> None:
    """To the byte at every point: what comes back for a read is held as long as the value itself would have been."""
    job = make_job(kind)
    plain, offloaded = (quick_profile(job.forward, job.model, mode=mode) for mode in ("run", "offload"))
    curves = [[(op.name, op.entry_bytes, op.peak_bytes) for op in each.ops] for each in (plain, offloaded)]
    assert curves[0] == curves[1]
    assert [v.death for v in plain.activations] == [v.death for v in offloaded.activations]


def state_of(job: Any) -> dict[str, Tensor]:
    found = {name: t.clone() for name, t in job.model.state_dict().items()}
    found |= {f"{n}.grad": p.grad.clone() for n, p in job.model.named_parameters() if p.grad is not None}
    for index, state in enumerate(job.optimizer.state.values()):
        found |= {f"optimizer {index} {k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    return found | {"random state": torch.get_rng_state()}


@pytest.mark.parametrize("mode", ["run", "offload"])
@pytest.mark.parametrize("trained", [False, True])
def test_it_leaves_the_training_state_alone(trained: bool, mode: str) -> None:
    job = make_job("conv")
    if trained:
        job.forward().backward()
        job.optimizer.step()
    gradients = [p.grad for p in job.model.parameters()]
    before = state_of(job)
    profile_job(job, mode)
    assert_same(before, state_of(job))
    assert all(p.grad is g for p, g in zip(job.model.parameters(), gradients, strict=True))


class Rebinding(nn.Module):
    """Replaces its buffer by a new tensor at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, rows: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + rows.mean(0)
        return (rows * self.weight).sin().sum()


def test_buffers_that_are_replaced_are_put_back() -> None:
    model, rows = Rebinding(), torch.rand(4, 8)
    buffer = model.mean
    quick_profile(lambda: model(rows), model)
    assert model.mean is buffer
    assert torch.equal(buffer, torch.zeros(8))


def test_state_is_restored_when_the_forward_raises() -> None:
    job = make_job("conv")
    before = state_of(job)

    def forward() -> Tensor:
        job.forward()
        raise ValueError("no data\nsecond line")

    with pytest.raises(ProfileError, match="the step raised ValueError: no data") as caught:
        quick_profile(forward, job.model, job.optimizer)
    assert "\n" not in str(caught.value)
    assert_same(before, state_of(job))
    assert job.model.training


def _growing(job: Any) -> Any:
    sizes = iter(range(2, 100))
    return lambda: job.model(torch.rand(next(sizes), 3, 8, 8)).sum()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda job: lambda: 3.0, "returned float, not a tensor"),
        (lambda job: lambda: job.model(job.batch[0]), "return a scalar loss"),
        (lambda job: lambda: job.forward().detach(), "does not require grad"),
        (_growing, "changes from run to run"),
    ],
    ids=["no tensor", "no scalar", "no gradient", "changing"],
)
def test_a_wrong_step_is_told_in_one_line(make: Any, told: str) -> None:
    job = make_job("conv")
    with pytest.raises(ProfileError, match=told) as caught:
        quick_profile(make(job), job.model, job.optimizer)
    assert "\n" not in str(caught.value)


def test_a_backward_inside_of_the_forward_is_told() -> None:
    job = make_job("conv")

    def forward() -> Tensor:
        job.forward().backward()
        return job.forward()

    with pytest.raises(ProfileError, match="itself runs a backward pass"):
        quick_profile(forward, job.model, job.optimizer)


@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_persistent_bytes_count_what_the_optimizer_will_create(factory: Any) -> None:
    """A profile before the first optimizer step promises what one after it measures."""
    job = make_job("conv", 2)
    options = {"momentum": 0.9} if factory is torch.optim.SGD else {}
    job.optimizer = factory(job.model.parameters(), lr=0.1, **options)
    before = profile_job(job)
    job.forward().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    after = profile_job(job)
    assert before.persistent_bytes == pytest.approx(after.persistent_bytes, rel=0.01)


def test_gradients_that_accumulate_count_from_the_start() -> None:
    from pooch.profiler import ProfileOptions, profile_step
    from tests.executor.support import LINK

    job = make_job("conv", 2)
    plain = profile_job(job)
    options = ProfileOptions(accumulate=True, warmup=0, repeats=1)
    accumulating = profile_step(job.forward, job.model, job.optimizer, LINK, options).profile
    gradient_bytes = sum(p.numel() * 4 for p in job.model.parameters())
    assert accumulating.persistent_bytes - plain.persistent_bytes == pytest.approx(gradient_bytes, rel=0.05)


def test_gradients_of_an_earlier_step_are_not_persistent() -> None:
    """The step is measured without them, as after `zero_grad`."""
    fresh = profile_job(make_job("conv"))
    job = make_job("conv")
    job.forward().backward()
    after = profile_job(job)
    assert after.persistent_bytes == fresh.persistent_bytes
    assert after.peak_bytes == fresh.peak_bytes
