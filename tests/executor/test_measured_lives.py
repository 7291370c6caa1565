"""The memory of a measured step, block by block."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pooch.api.measure.measured_lives import measured_lives
from pooch.api.step_lives import lives_of
from pooch.errors import UsageError
from pooch.executor import apply_plan, run
from pooch.executor.observed import ObservedStep
from pooch.ir.lives import StepLives
from pooch.report.memory_viz import memory_snapshot
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.workloads import Workload
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, mixed, profile_job, tight_plan, train
from tests.report.test_memory_viz import peak_of


def workload() -> Workload:
    job = make_job("conv")
    return Workload(job.model, job.forward)


@pytest.mark.parametrize("how", ["swap", "recompute", "mixed"])
def test_blocks_tell_what_the_plan_does_with_them(how: str) -> None:
    profile = profile_job(make_job("conv"))
    decisions = mixed(profile) if how == "mixed" else all_of(profile, how)  # type: ignore[arg-type]
    plan = tight_plan(profile, decisions)
    assert plan.choices
    lives = measured_lives(workload, plan)
    (events,) = memory_snapshot(lives)["device_traces"]
    assert peak_of(events) == lives.peak_bytes, "and no block lies on another"
    decided = {"kept", "swapped", "recomputed"}

    def blocks_of(lives: StepLives) -> Counter[tuple[int, str, int]]:
        return Counter(
            (each.number, each.decision, each.size_bytes) for each in lives.lives if each.decision in decided
        )

    measured, predicted = blocks_of(lives), blocks_of(lives_of(profile, plan))
    assert set(measured) <= set(predicted)
    emptied = {action.target for action in plan.schedule.actions if action.kind == "empty"}
    for block, times in predicted.items():
        in_place = profile.values[block[0]].overwrites >= 0  # it lies where another value lay before
        if not in_place and block[0] not in emptied:
            assert measured[block] == times, "it goes and comes back as predicted"


def test_steps_that_nothing_watches_are_refused() -> None:
    profile = profile_job(make_job("conv"))
    with pytest.raises(UsageError, match="moves nothing"):
        measured_lives(workload, tight_plan(profile, {}))


def test_the_peak_is_what_is_measured() -> None:
    profile = profile_job(make_job("conv"))
    plan = tight_plan(profile, all_of(profile, "swap"))
    measured = measured_lives(workload, plan).peak_bytes
    job = make_job("conv")
    with apply_plan(plan, job.model) as applied:
        applied.mark_values()
        for _ in range(3):
            job.model.zero_grad()
            with MemoryMeter(torch.device("cpu")) as meter:
                with applied.step():
                    loss = job.forward()
                loss.backward()
    assert abs(measured - meter.peak_bytes) <= 64, "what is alive before differs by a scalar of the test"


def test_steps_that_are_looked_at_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_job(make_job("conv"))
    plain, _ = train(make_job("conv"), None)
    monkeypatch.setattr(run, "Step", ObservedStep)
    looked_at, stats = train(make_job("conv"), tight_plan(profile, mixed(profile)))
    assert stats is not None
    assert stats.swapped_in_bytes > 0
    assert_same(plain, looked_at)
