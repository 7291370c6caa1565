"""Plans in which also leaves what outlives a step: parameters, gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import pooch
from pooch.analysis.persistence import can_move
from pooch.api.options import PlanOptions
from pooch.api.planning import plan_with
from pooch.errors import InfeasibleBudget, PlanMismatch, UsageError
from pooch.ir import Link, Plan, Profile
from tests.persistent_toys import layered, persistent_profile, with_tensors
from tests.toys import FAST_LINK, chain, in_full

LINK = Link("toy tier", 0.1, 0.1, 64.0, 64.0)


def step(
    layers: int = 6, *, size_bytes: int = 64, activation_bytes: int = 64, link: Link = LINK, frozen: bool = False
) -> Profile:
    return with_tensors(
        chain(layers, size_bytes=activation_bytes, link=link), layered(layers, size_bytes=size_bytes, frozen=frozen)
    )


def planned(profile: Profile, budget_bytes: int, **options: object) -> Plan:
    return pooch.plan(profile, budget_bytes, region="step", moves="all", **options)  # type: ignore[arg-type]


def smallest(profile: Profile, moves: str) -> int:
    return pooch.smallest_budget(profile, region="step", moves=moves)  # type: ignore[arg-type]


def test_a_step_is_planned_below_what_outlives_it() -> None:
    # GIVEN a step whose parameters, gradients and state take most of the memory
    profile = step(activation_bytes=16)
    assert profile.persistent_bytes > 0.6 * profile.peak_bytes
    budget_bytes = profile.persistent_bytes // 2
    # WHEN it is planned in half of what they take alone
    with pytest.raises(InfeasibleBudget):
        pooch.plan(profile, budget_bytes, region="step")
    plan = planned(profile, budget_bytes)
    # THEN they leave, within the budget, and the plan says which and what that takes
    assert plan.predicted_peak_bytes <= budget_bytes
    moved = plan.persistent
    assert moved is not None
    assert {move.kind for move in moved.moves} >= {"parameter", "state"}
    assert moved.copied_in_bytes > 0
    assert moved.copied_out_bytes > 0
    assert plan.host_bytes >= moved.tier_bytes > 0
    assert plan.predicted_step_ms > profile.step_ms
    assert 0 <= plan.gap < 1
    assert plan.lower_bound_ms <= plan.predicted_step_ms


def test_the_smallest_budget_falls_and_is_kept() -> None:
    profile = step(activation_bytes=16)
    least_bytes = smallest(profile, "all")
    assert least_bytes < 0.6 * smallest(profile, "activations")
    assert planned(profile, least_bytes).predicted_peak_bytes <= least_bytes
    with pytest.raises(InfeasibleBudget) as refused:
        planned(profile, least_bytes - 1)
    assert refused.value.minimum_bytes == least_bytes


def test_what_is_frozen_is_never_copied_out() -> None:
    profile = step(frozen=True, activation_bytes=16)
    moved = planned(profile, smallest(profile, "all")).persistent
    assert moved is not None
    assert moved.copied_out_bytes == 0
    assert moved.copied_in_bytes > 0


def test_everything_stays_where_that_is_faster() -> None:
    """A step whose activations alone have to leave, by replays that cost next to nothing, over a slow link."""
    slow = Link("slow", 5.0, 5.0, 1.0, 1.0)
    profile = step(size_bytes=8, activation_bytes=256, link=slow)
    plan = planned(profile, int(0.8 * profile.peak_bytes))
    assert plan.persistent is None
    assert any("stays" in note for note in plan.notes)


def test_with_enough_memory_nothing_leaves() -> None:
    profile = step()
    plan = planned(profile, profile.peak_bytes)
    assert plan.persistent is None
    assert not plan.schedule.actions


def test_a_plan_is_saved_and_simulated_as_it_was_made(tmp_path: Path) -> None:
    profile = step(activation_bytes=16)
    plan = planned(profile, profile.persistent_bytes // 2)
    plan.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    again, profile_again = Plan.load(tmp_path / "plan.json"), Profile.load(tmp_path / "profile.json")
    assert again.persistent == plan.persistent
    assert profile_again == profile
    timeline = pooch.simulate(profile_again, again)
    assert timeline.step_ms == plan.predicted_step_ms
    assert timeline.peak_bytes == plan.predicted_peak_bytes
    assert timeline.host_bytes == plan.host_bytes
    moves = [each for each in timeline.intervals if each.kind == "move"]
    assert plan.persistent is not None
    assert sum(profile.persistent[each.target].size_bytes for each in moves if each.stream == "copy_in") == (
        plan.persistent.copied_in_bytes
    )


def test_planning_in_another_process_is_the_same() -> None:
    profile = step(activation_bytes=16)
    options = PlanOptions(region="step", moves="all", explain=False)
    aside = plan_with(profile, profile.persistent_bytes // 2, options, aside=True)
    here = plan_with(profile, profile.persistent_bytes // 2, options)
    assert in_full(replace(aside, planning_ms=0.0)) == in_full(replace(here, planning_ms=0.0))


def test_a_plan_for_other_parameters_is_refused() -> None:
    profile = step(activation_bytes=16)
    plan = planned(profile, profile.persistent_bytes // 2)
    renamed = tuple(replace(each, name=f"other.{each.name}") for each in profile.persistent)
    with pytest.raises(PlanMismatch, match="another profile"):
        pooch.simulate(replace(profile, persistent=renamed), plan)


def test_more_memory_is_not_slower() -> None:
    profile = step(8, activation_bytes=32)
    low, high = smallest(profile, "all"), profile.peak_bytes
    times_ms = [
        planned(profile, int(low + share * (high - low)), explain=False).predicted_step_ms
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for less_ms, more_ms in pairwise(times_ms):
        assert more_ms <= less_ms * 1.02


def test_a_host_budget_is_shared() -> None:
    profile = step(activation_bytes=16)
    least_bytes = smallest(profile, "all")
    whole_bytes = sum(each.size_bytes for each in profile.persistent)
    plan = planned(profile, least_bytes, host_budget=whole_bytes + 16 * 4096 + 4096 * len(profile.persistent))
    assert plan.persistent is not None
    assert plan.host_bytes <= whole_bytes + 16 * 4096 + 4096 * len(profile.persistent)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"moves": "everything"}, "choose activations or all"),
        ({"moves": "all", "bound": "arena"}, "no room in an arena"),
        ({"moves": "all", "microbatches_in_flight": 2}, "one microbatch"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pooch.plan(step(), "50%", region="step", **options)  # type: ignore[arg-type]


def test_a_profile_that_knows_of_nothing_is_planned_as_ever() -> None:
    profile = chain(6, size_bytes=64, link=FAST_LINK)
    assert not can_move(profile)
    assert planned(profile, int(0.7 * profile.peak_bytes)).persistent is None


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.7]))
def test_any_step_is_planned_within_its_budget_and_above_its_bound(seed: int, share: float) -> None:
    random = Random(seed)
    profile = persistent_profile(random, random.randint(3, 7))
    least_bytes = smallest(profile, "all")
    assume(least_bytes < profile.peak_bytes)
    budget_bytes = int(least_bytes + share * (profile.peak_bytes - least_bytes))
    plan = planned(profile, budget_bytes, explain=False)
    assert plan.predicted_peak_bytes <= budget_bytes
    assert plan.lower_bound_ms <= plan.predicted_step_ms + 1e-9
    assert pooch.simulate(profile, plan).step_ms == pytest.approx(plan.predicted_step_ms)
