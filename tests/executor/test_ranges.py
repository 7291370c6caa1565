"""Copies and replays have names in the user's profiler, and are not looked at where there is none."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pooch.executor import apply_plan
from pooch.torchtools import ranges
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, mixed, profile_job, region_of, tight_plan, train


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_the_profiler_shows_what_a_step_moves(choice: str) -> None:
    job = make_job("conv")
    profile = profile_job(job)
    plan = tight_plan(profile, all_of(profile, choice))  # type: ignore[arg-type]
    with apply_plan(plan, job.model, verify="off") as run:
        for looked_at in (False, True):
            if looked_at:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.__enter__()
            with region_of(run):
                loss = job.forward()
            loss.backward()
        profiler.__exit__(None, None, None)
        names = [event.name for event in profiler.events() if event.name.startswith("pooch: ")]
        kinds = Counter(" ".join(name.split()[1:3]) for name in names)
        if choice == "swap":
            assert kinds["copy out"] == sum(action.kind == "copy_out" for action in plan.schedule.actions)
            assert kinds["copy in"] > 0
        else:
            assert sum("replay" in kind for kind in kinds) > 0
            replays = sum(name.startswith("pooch: replay") for name in names)
            assert replays == run.stats.recomputed_ops


def test_numbers_under_a_profiler_are_the_same() -> None:
    profile = profile_job(make_job("conv"))
    plain, _ = train(make_job("conv"), None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        looked_at, _ = train(make_job("conv"), tight_plan(profile, mixed(profile)))
    assert_same(plain, looked_at)


def test_nothing_is_named_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> None:
        raise AssertionError(f"{name} is named")

    monkeypatch.setattr(ranges, "record_function", named)
    profile = profile_job(make_job("conv"))
    train(make_job("conv"), tight_plan(profile, mixed(profile)))


def test_profilers_of_our_own_see_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from their records is what ops do."""
    monkeypatch.setattr(ranges.MemoryTracer, "running", 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert ranges.copy_range(True, torch.ones(1)) is ranges.copy_range(False, torch.ones(1))
