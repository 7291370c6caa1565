"""`aten::linear` adds its bias in place in plain training, and out of place under a mode: profiles tell both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.api.hooked import dataflow_of
from pooch.errors import InfeasibleBudget
from pooch.executor import mode as watching
from pooch.ir import HookCosts, Profile
from pooch.torchtools import watch
from tests.executor.nets import Job
from tests.executor.support import profile_job, tight_plan
from tests.executor.test_peaks import NOISE, measured_peak
from tests.profiler.test_fake import fake_job_profile

BIAS_SUM = "aten.add.Tensor"


class Transposing(nn.Module):
    """A linear layer on rows that do not lie one after the other; its result is what makes the step's peak."""

    def __init__(self, writes_out: bool) -> None:
        super().__init__()
        self.narrow, self.wide, self.writes_out = nn.Linear(64, 64), nn.Linear(64, 2048), writes_out

    def forward(self, rows: Tensor) -> Tensor:
        crossed = self.narrow(rows).sigmoid().transpose(0, 1)
        if self.writes_out:
            return (crossed @ self.wide.weight.t() + self.wide.bias).sum()
        return self.wide(crossed).sum()


def job_of(writes_out: bool = False) -> Job:
    model = Transposing(writes_out)
    return Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda generator: (torch.randn(64, 32, 64, generator=generator),),
        lambda net, batch: net(batch[0]),
        torch.device("cpu"),
    )


def bias_sums(profile: Profile) -> list[Any]:
    return [op for op in profile.ops if op.name == BIAS_SUM]


@pytest.mark.parametrize("mode", ["run", "offload", "fake"])
def test_the_in_core_peak_is_that_of_plain_training(mode: str) -> None:
    job = job_of()
    profile = fake_job_profile(job) if mode == "fake" else profile_job(job, mode)
    (summed,) = bias_sums(profile)
    assert summed.hooked_bytes == profile.values[summed.writes[0]].allocated_bytes
    assert measured_peak(job, None) == pytest.approx(profile.peak_bytes, rel=NOISE)


@pytest.mark.parametrize("mode", ["run", "offload", "fake"])
def test_a_sum_that_the_program_writes_out_takes_its_memory_in_plain_training(mode: str) -> None:
    job = job_of(writes_out=True)
    profile = fake_job_profile(job) if mode == "fake" else profile_job(job, mode)
    assert [op.hooked_bytes for op in bias_sums(profile)] == [0]
    assert measured_peak(job, None) == pytest.approx(profile.peak_bytes, rel=NOISE)


@pytest.mark.parametrize("mode", ["run", "fake"])
def test_a_planned_step_is_predicted_with_what_a_mode_adds(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    profile = fake_job_profile(job) if mode == "fake" else profile_job(job, mode)
    plan = tight_plan(profile, {value.id: "swap" for value in profile.activations[:1]})
    assert plan.schedule.actions
    assert plan.predicted_peak_bytes > profile.peak_bytes
    if watch.LIBRARY.get() is not None:  # what watches natively lets the bias be added in place
        assert measured_peak(job, plan) <= profile.peak_bytes * (1 + NOISE)
    monkeypatch.setattr(watching, "is_native", lambda _: False)
    assert measured_peak(job, plan) == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)


def test_only_what_runs_under_hooks_takes_more() -> None:
    profile = profile_job(job_of())
    (summed,) = bias_sums(profile)
    peaks = {hooked: dataflow_of(profile, "step", hooked=hooked).in_core_points.max() for hooked in (False, True)}
    assert peaks[False] == profile.peak_bytes
    assert peaks[True] == summed.peak_bytes + summed.hooked_bytes
    outside = replace(profile, model_begin=summed.index + 1, model_end=profile.forward_ops)
    assert dataflow_of(outside, "model", hooked=True).in_core_points.max() == profile.peak_bytes


def test_a_plan_that_moves_things_without_need_keeps_its_budget() -> None:
    job = job_of()
    profile = profile_job(job)
    assert not pooch.plan(profile, profile.peak_bytes, region="step").schedule.actions
    with pytest.raises(InfeasibleBudget):  # under hooks the sum alone takes more than plain training
        pooch.plan(profile, profile.peak_bytes, policy="swap_all", region="step")


def test_a_plan_for_steps_that_are_watched_natively_leaves_out_what_a_mode_adds() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")
    job = job_of()
    profile = profile_job(job)
    native = replace(profile, hooks=HookCosts(adds_in_place=True))
    plan = tight_plan(native, {value.id: "swap" for value in native.activations[:1]})
    assert plan.schedule.actions
    assert plan.predicted_peak_bytes < tight_plan(profile, plan.decisions).predicted_peak_bytes
    assert measured_peak(job, plan) == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)
