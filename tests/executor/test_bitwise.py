"""Training under a plan gives, bit by bit, what plain training gives, and the plan's mechanism really ran."""

from __future__ import annotations

import pytest
import torch

import pooch
from pooch.api.manual import plan_from_decisions
from pooch.ir import Choice, Region
from tests.executor.nets import KINDS, make_job
from tests.executor.support import (
    all_of,
    assert_same,
    mixed,
    moved_bytes,
    planned_replays,
    profile_job,
    tight_plan,
    train,
)

pytestmark = pytest.mark.usefixtures("watched_by")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("region", ["model", "step"])
@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_bitwise_equal(kind: str, choice: Choice, region: Region, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain, _ = train(make_job(kind, device=device), None)
    job = make_job(kind, device=device)
    profile = profile_job(job)
    decisions = mixed(profile, region) if choice == "mixed" else all_of(profile, choice, region)
    plan = tight_plan(profile, decisions, region)
    planned, stats = train(job, plan)
    assert stats is not None
    assert len(decisions) > 3
    assert (stats.swapped_out_bytes > 0) == (choice != "recompute")
    assert (stats.recomputed_ops > 0) == (choice != "swap")
    assert stats.swapped_out_bytes == moved_bytes(plan, profile, "copy_out")
    assert stats.swapped_in_bytes == moved_bytes(plan, profile, "copy_in", "refill")
    assert stats.emptied_bytes == moved_bytes(plan, profile, "empty")
    assert stats.emptied_bytes > 0 or choice == "recompute"
    assert stats.recomputed_ops == planned_replays(plan)
    assert (stats.late_swaps, stats.mismatches, stats.kept_after_errors) == (0, 0, 0)
    assert_same(plain, planned)


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_installs_nothing(kind: str) -> None:
    plain, _ = train(make_job(kind), None)
    job = make_job(kind)
    plan = tight_plan(profile_job(job), {})
    planned, stats = train(job, plan)
    assert plan.schedule.actions == ()
    assert stats is not None
    assert stats.recomputed_ops == stats.swapped_out_bytes == 0
    assert_same(plain, planned)


@pytest.mark.parametrize("region", ["model", "step"])
def test_a_planned_budget(region: Region) -> None:
    plain, _ = train(make_job("conv", 2), None)
    job = make_job("conv", 2)
    profile = profile_job(job)
    budget_bytes = profile.persistent_bytes + int(0.7 * (profile.peak_bytes - profile.persistent_bytes))
    plan = pooch.plan(profile, budget_bytes, region=region, time_limit_s=5)
    assert {"swap", "recompute"} & set(plan.decisions.values())
    planned, stats = train(job, plan)
    assert stats is not None
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0
    assert stats.late_swaps == 0
    assert_same(plain, planned)


def test_decisions_by_hand() -> None:
    plain, _ = train(make_job("transformer", 2), None)
    job = make_job("transformer", 2)
    profile = profile_job(job)
    plan = plan_from_decisions(profile, mixed(profile, "model"))
    planned, stats = train(job, plan)
    assert stats is not None
    assert stats.swapped_out_bytes > 0
    assert stats.recomputed_ops == planned_replays(plan) > 0
    assert_same(plain, planned)


def test_batch_norm_moves_once() -> None:
    job = make_job("conv")
    profile = profile_job(job)
    train(job, tight_plan(profile, all_of(profile, "recompute")), steps=3)
    tracked = {name: int(b) for name, b in job.model.named_buffers() if name.endswith("num_batches_tracked")}
    assert len(tracked) == 3
    assert set(tracked.values()) == {3}
