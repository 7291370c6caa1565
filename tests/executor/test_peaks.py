"""The measured peak is at most the budget, and what was predicted."""

from __future__ import annotations

import pytest
import torch

import pooch
from pooch.errors import InfeasibleBudget
from pooch.executor import Run, apply_plan
from pooch.ir import Choice, Plan, Profile, Region
from pooch.torchtools.memory_meter import MemoryMeter
from tests.executor.nets import KINDS, Job, make_job
from tests.executor.support import all_of, budget_at, profile_job, region_of, tight_plan

NOISE = 0.002


def measured_peak(job: Job, plan: Plan | None) -> int:
    """Of the second step, when the optimizer's state and everything lazy is there: what tensors asked for."""
    if plan is None:
        return _peak(job, None)
    with apply_plan(plan, job.model) as run:
        peak = _peak(job, run)
        assert run.stats.late_swaps == 0
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    return peak


def _peak(job: Job, run: Run | None) -> int:
    for _ in range(2):
        job.optimizer.zero_grad()
        with MemoryMeter(job.device) as meter:
            with region_of(run):
                loss = job.forward()
            loss.backward()
        del loss
        job.optimizer.step()
    return meter.peak_bytes - meter.rounding_bytes


@pytest.mark.usefixtures("without_floor")  # other tests of the process may hold tensors
@pytest.mark.parametrize("region", ["model", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_peak_is_within_the_budget_and_as_predicted(kind: str, region: Region) -> None:
    job = make_job(kind, 2)
    profile = profile_job(job)
    plan = planned_at(profile, 0.7, region)
    peak = measured_peak(job, plan)
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)
    assert peak < budget_at(profile, 0.95)


def planned_at(profile: Profile, share: float, region: Region) -> Plan:
    """A plan with room for a share of what comes and goes in core, or at the smallest budget where that is more."""
    try:
        return pooch.plan(profile, budget_at(profile, share), region=region, time_limit_s=5)
    except InfeasibleBudget as error:
        return pooch.plan(profile, error.minimum_bytes, region=region, time_limit_s=5)


@pytest.mark.parametrize("choice", ["swap", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_smallest_peaks_are_as_predicted(kind: str, choice: Choice) -> None:
    job = make_job(kind, 2)
    profile = profile_job(job)
    plan = tight_plan(profile, all_of(profile, choice))
    assert measured_peak(job, plan) == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)


def test_random_states_of_many_replayed_ops_are_within_the_budget() -> None:
    """A state of the CPU's generator is 5,056 bytes; a deep network with dropout remembers one for each replay."""
    blocks = [layer for _ in range(12) for layer in (torch.nn.Linear(64, 64), torch.nn.Dropout(0.3))]
    model = torch.nn.Sequential(*blocks)
    job = Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda generator: (torch.randn(256, 64, generator=generator),),
        lambda net, batch: net(batch[0]).square().sum(),
        torch.get_default_device(),
    )
    profile = profile_job(job)
    plan = tight_plan(profile, all_of(profile, "recompute"))
    replayed = {action.target for action in plan.schedule.actions if action.kind == "replay"}
    assert sum(profile.ops[op].random for op in replayed) >= 10
    assert measured_peak(job, plan) <= plan.predicted_peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_in_core_peak_is_that_of_plain_training(kind: str) -> None:
    job = make_job(kind, 2)
    profile = profile_job(job)
    assert measured_peak(job, None) == pytest.approx(profile.peak_bytes, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_offload_mode_tells_the_same(kind: str) -> None:
    job = make_job(kind, 2)
    plain, offloaded = profile_job(job), profile_job(job, "offload")
    assert offloaded.mode == "offload"
    assert [v.id for v in offloaded.activations] == [v.id for v in plain.activations]
    for one, other in zip(offloaded.activations, plain.activations, strict=True):
        assert (one.release, one.first_unpack) == (other.release, other.first_unpack)
    offloaded_bytes = offloaded.peak_bytes - offloaded.persistent_bytes
    assert offloaded_bytes == pytest.approx(plain.peak_bytes - plain.persistent_bytes, rel=0.01)


def test_meter_counts_what_lives_and_what_comes() -> None:
    before = torch.zeros(1 << 18)
    with MemoryMeter(before.device) as empty:
        pass
    with MemoryMeter(before.device) as meter:
        after = torch.zeros(1 << 20)
        del after
    assert empty.peak_bytes >= before.untyped_storage().nbytes()
    assert meter.peak_bytes - empty.peak_bytes == pytest.approx(1 << 22, rel=0.01)
