"""The largest size that fits: against planning every size, and what is told about it."""

from __future__ import annotations

import sys
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pooch.api.batch_search.results import MaxBatch, Sizes
from pooch.api.batch_search.search import largest_size
from pooch.api.options import PlanOptions
from pooch.api.planning import plan
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Profile
from tests.rescaling import rescale
from tests.toys import FAST_LINK, SLOW_LINK, blocks, random_profile

MOST = 24


class Growing:
    """A toy step at any batch size; counts what is profiled."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Profile:
        self.sizes.append(size)
        scaled = rescale(self.profile, size, 1, self.profile.link, 2**40, "a toy")
        return scaled if self.profile.batch_size else _with_items(scaled, size)


def _with_items(profile: Profile, items: int) -> Profile:
    from dataclasses import replace

    return replace(profile, batch_size=items)


def stepwise(policy: str = "ilp") -> PlanOptions:
    return PlanOptions(policy, time_limit_s=5, region="step")


def exhaustive(growing: Growing, sizes: range, budget_bytes: int, policy: str) -> int | None:
    """Plans every size."""
    fitting = []
    for size in sizes:
        try:
            plan(growing(size), budget_bytes, policy=policy, region="step", time_limit_s=5)
        except InfeasibleBudget:
            continue
        fitting.append(size)
    return max(fitting, default=None)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1.5, 8.0), policy=st.sampled_from(["swap_opt", "ilp"]))
def test_it_finds_what_planning_every_size_finds(seed: int, factor: float, policy: str) -> None:
    growing = Growing(random_profile(Random(seed), 6))
    budget_bytes = int(factor * growing.profile.peak_bytes)
    found = largest_size(growing, Sizes(most=MOST), budget_bytes, stepwise(policy), points=2)
    assert found.largest.size == exhaustive(growing, range(1, MOST + 1), budget_bytes, policy)


@pytest.fixture(scope="module")
def found() -> tuple[Growing, MaxBatch]:
    growing = Growing(blocks(6, link=FAST_LINK))
    return growing, largest_size(growing, Sizes(), 50 * growing.profile.peak_bytes, stepwise(), start=8)


def test_more_fits_under_a_plan_than_without_one(found: tuple[Growing, MaxBatch]) -> None:
    _, result = found
    assert result.in_core is not None
    assert result.in_core.plan.schedule.actions == ()
    assert result.largest.size > result.in_core.size >= 50  # toys have no persistent bytes
    assert result.multiple == result.largest.size / result.in_core.size
    assert result.largest.peak_bytes <= result.budget_bytes < result.largest.in_core_peak_bytes
    assert result.refused[0] == result.largest.size + 1
    assert result.refused[1] > result.budget_bytes


def test_few_sizes_are_profiled_and_each_once(found: tuple[Growing, MaxBatch]) -> None:
    growing, result = found
    assert len(growing.sizes) == len(set(growing.sizes)) == result.profiles
    assert result.profiles <= 16


def test_the_curve_runs_from_the_in_core_size_to_the_largest(found: tuple[Growing, MaxBatch]) -> None:
    _, result = found
    assert result.in_core is not None
    planned = [point.size for point in result.curve]
    assert planned == sorted(planned)
    assert (planned[0], planned[-1]) == (result.in_core.size, result.largest.size)
    assert len(planned) >= 5
    assert result.best.items_per_s == max(point.items_per_s for point in result.curve)
    frame = result.to_frame()
    assert list(frame.index) == planned
    assert (frame["peak_bytes"] <= result.budget_bytes).all()


def test_only_legal_sizes_are_asked_for() -> None:
    growing = Growing(blocks(4, link=SLOW_LINK))
    sizes = Sizes("volume_size", smallest=32, step=16)
    result = largest_size(growing, sizes, 100 * growing.profile.peak_bytes, stepwise("swap_opt"), points=2)
    assert all(size >= 32 and (size - 32) % 16 == 0 for size in growing.sizes)
    assert result.refused[0] == result.largest.size + 16


def test_where_not_even_the_smallest_size_fits_the_need_is_named() -> None:
    growing = Growing(blocks(4))
    with pytest.raises(InfeasibleBudget) as raised:
        largest_size(growing, Sizes(), growing.profile.peak_bytes // 50)
    again = largest_size(growing, Sizes(), raised.value.minimum_bytes, points=2)
    assert again.largest.size >= 1
    assert again.in_core is None
    assert again.multiple is None


def test_a_share_is_no_budget_here() -> None:
    with pytest.raises(UsageError, match="nothing is known yet of what"):
        largest_size(Growing(blocks(2)), Sizes(), "60%")


def test_where_a_method_does_better_than_its_own_refusal_the_search_goes_on_in_growing_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a need that is told too large, as methods do that bisect over budgets
    search_module = sys.modules["pooch.api.batch_search.search"]
    honest = search_module.smallest_with
    monkeypatch.setattr(search_module, "smallest_with", lambda *args, **how: int(1.5 * honest(*args, **how)))
    growing = Growing(blocks(4, link=SLOW_LINK))
    budget_bytes = 60 * growing.profile.peak_bytes
    found = largest_size(growing, Sizes(), budget_bytes, stepwise("swap_opt"), points=2)
    # THEN the same size is found as with the right one, and not by asking for every size up to there
    monkeypatch.undo()
    assert (
        found.largest.size == largest_size(growing, Sizes(), budget_bytes, stepwise("swap_opt"), points=2).largest.size
    )
    assert found.plans <= 16
