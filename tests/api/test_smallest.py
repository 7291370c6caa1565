"""The smallest budget: it has a plan, nothing below has one of the same kind, and "min" asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pooch
from pooch.api import profiling
from pooch.api.batch_search.max_batch import max_batch
from pooch.api.budgets import parse_budget
from pooch.api.manual import plan_from_decisions
from pooch.api.measure.comparison import compare
from pooch.api.measure.measuring import optimize
from pooch.api.options import PlanOptions
from pooch.errors import InfeasibleBudget, UsageError
from pooch.executor.engines import measurement
from pooch.ir import Profile
from pooch.workloads import WorkloadFactory
from tests.executor.support import LINK, quick_profile
from tests.toys import blocks


class Waves(torch.nn.Module):
    """Six activations of 256 KiB each, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            hidden = torch.sin(hidden * scale)
        return hidden.square().mean()


MODEL, DATA = Waves(), torch.linspace(-1, 1, 2**16)


def forward() -> torch.Tensor:
    return MODEL(DATA)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def measured() -> Profile:
    return quick_profile(forward, MODEL)


@pytest.mark.parametrize("region", ["model", "step"])
@pytest.mark.parametrize("policy", ["ilp", "swap_all", "chen_sqrt"])
def test_there_is_a_plan_for_the_smallest_budget(measured: Profile, policy: str, region: Any) -> None:
    for profile in (measured, blocks(6)):
        smallest = pooch.smallest_budget(profile, policy=policy, region=region)
        chosen = pooch.plan(profile, smallest, policy=policy, region=region, explain=False)
        assert chosen.predicted_peak_bytes <= smallest <= profile.peak_bytes
        in_words = pooch.plan(profile, " MIN ", policy=policy, region=region, explain=False)
        assert in_words.budget_bytes == smallest
        assert in_words.decisions == chosen.decisions


def test_below_the_smallest_budget_there_is_none_of_its_kind(measured: Profile) -> None:
    smallest = pooch.smallest_budget(measured, policy="swap_all")
    assert smallest < measured.peak_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        pooch.plan(measured, smallest - 1, policy="swap_all")
    assert caught.value.minimum_bytes == smallest


def test_a_host_budget_and_options_count_for_min() -> None:
    profile = blocks(6)
    free, bound = (pooch.smallest_budget(profile, policy="swap_all", host_budget=host) for host in (None, 4096))
    assert bound >= free
    assert pooch.plan(profile, "min", host_budget=4096).schedule.host_bytes <= 4096


def test_each_policy_has_its_own_minimum_in_a_comparison(measured: Profile) -> None:
    rows = compare(measured, ["min", "100%"], policies=["ilp", "swap_all"])
    assert [row.policy for row in rows] == ["ilp", "swap_all"] * 2
    for row in rows[:2]:
        assert row.plan is not None
        assert row.budget_bytes == pooch.smallest_budget(measured, policy=row.policy) == row.plan.budget_bytes
    assert [row.budget_bytes for row in rows[2:]] == [measured.peak_bytes] * 2


def test_a_guard_trains_under_the_smallest_budget(measured: Profile) -> None:
    with pooch.guard(measured, "min", MODEL) as guard:
        guard.step(forward)
        assert guard.plan.budget_bytes == pooch.smallest_budget(measured, region="step") < measured.peak_bytes
        assert guard.run.stats.swapped_out_bytes + guard.run.stats.recomputed_ops > 0


def test_decisions_by_hand_reach_their_own_minimum() -> None:
    profile = blocks(6)
    decisions = {profile.activations[0].id: "swap"}
    lowest = plan_from_decisions(profile, decisions)
    assert plan_from_decisions(profile, decisions, budget="min").budget_bytes == lowest.predicted_peak_bytes


def test_what_is_no_budget_for_a_step_cannot_be_min() -> None:
    with pytest.raises(UsageError, match="the host budget cannot be 'min': give a host budget such as 16GiB"):
        pooch.plan(blocks(4), "min", host_budget="min")
    with pytest.raises(UsageError, match="the budget cannot be 'min'"):
        parse_budget("min", 100)
    with pytest.raises(UsageError, match="the budget cannot be 'min'"):
        max_batch("lstm@small", "min")


USER_FILE = """
import pooch
from tests.api.test_smallest import DATA, Waves

def make():
    model = Waves()
    return pooch.Workload(model, lambda: model(DATA.repeat(16)))
"""


def test_optimize_trains_under_the_smallest_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    monkeypatch.setattr(measurement, "with_step_shares", lambda link, *measuring: link)
    monkeypatch.setattr(profiling, "with_hook_costs", lambda profile, progress: profile)
    (tmp_path / "waves.py").write_text(USER_FILE)
    result = optimize(
        WorkloadFactory(f"{tmp_path / 'waves.py'}:make"), "min", PlanOptions(time_limit_s=3, region="step"), steps=1
    )
    assert result.plan.budget_bytes == pooch.smallest_budget(result.profile, region="step") < result.profile.peak_bytes
    assert result.training.within_budget
    assert (result.training.swapped_out_bytes or 0) + (result.training.recomputed_ops or 0) > 0
