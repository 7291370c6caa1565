"""More memory is never slower: exactly from rungs on and where smaller plans are known, else within the gap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pooch.api.budgets import parse_budget
from pooch.errors import InfeasibleBudget
from pooch.ir import Link, Profile
from pooch.planner import PlanningRequest, PolicyOutcome
from pooch.planner.search import search as algorithm
from pooch.planner.search.programs import Programs
from pooch.planner.search.search import rungs_below, search
from pooch.planner.search.trials import Trials
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import case, leave_no_time, make_plan
from tests.toys import blocks, chain, profiles

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NOISE_MS = 1e-6
MIDDLING = Link("toy tier", 0.1, 0.1, 8.0, 8.0, full_duplex=False, out_compute_share=0.25, in_compute_share=0.5)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(profiles(max_ops=12))
def test_a_row_of_budgets_never_gets_slower(profile: Profile) -> None:
    of = case(profile)
    assume(len(of.dataflow.activations) >= 2)
    plans: dict[int, PolicyOutcome] = {}
    for budget_bytes in (of.share(share) for share in SHARES):
        with suppress(InfeasibleBudget):
            known = tuple(plans.values())
            plans[budget_bytes] = make_plan(of.dataflow, budget_bytes, of.evaluator, known=known)
    for (small, less), (large, more) in pairwise(plans.items()):
        assert less.timeline.peak_bytes <= small < large
        assert more.timeline.step_ms <= less.timeline.step_ms + NOISE_MS


@pytest.mark.parametrize(
    "profile", [chain(7, link=MIDDLING, size_bytes=16), blocks(4), gpt2(layers=4, link=PCIE_16, speed=50)]
)
def test_alone_a_larger_budget_is_slower_by_no_more_than_its_gap(profile: Profile) -> None:
    # step(large) = bound(large) / (1 - gap), and the bound under the larger budget is below every plan of the smaller
    of = case(profile)
    planned = [make_plan(of.dataflow, of.share(share), of.evaluator) for share in SHARES[3::2]]
    for less, more in pairwise(planned):
        assert more.lower_bound_ms <= less.timeline.step_ms + NOISE_MS
        assert more.timeline.step_ms <= less.timeline.step_ms / (1 - more.gap) + NOISE_MS


def test_a_known_plan_is_the_answer_where_nothing_better_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a plan under a smaller budget, and no time to search
    of = case(gpt2(layers=4, link=PCIE_16, speed=50))
    good = make_plan(of.dataflow, of.share(0.7), of.evaluator)
    leave_no_time(monkeypatch)
    alone = make_plan(of.dataflow, of.share(0.75), of.evaluator)
    assert alone.timeline.step_ms > good.timeline.step_ms + NOISE_MS
    hurried = make_plan(of.dataflow, of.share(0.75), of.evaluator, known=[good])
    assert hurried.timeline.step_ms <= good.timeline.step_ms + NOISE_MS


def separate_steps_ms(profile: Profile, budgets: list[str | int], seed: int = 0) -> dict[int, float]:
    """Each budget planned by itself, in any order; those that nothing fits into are left out."""
    found: dict[int, float] = {}
    for budget in Random(seed).sample(budgets, len(budgets)):
        of, budget_bytes = case(profile), parse_budget(budget, profile.peak_bytes)
        try:
            found[budget_bytes] = make_plan(of.dataflow, budget_bytes, of.evaluator).timeline.step_ms
        except InfeasibleBudget:
            continue
    return dict(sorted(found.items()))


RUNGS = [f"{percent}%" for percent in range(40, 101, 5)]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(profiles(max_ops=12), st.integers(0, 9), st.floats(0.3, 1.0))
def test_rungs_planned_apart_never_get_slower(profile: Profile, seed: int, share: float) -> None:
    # GIVEN every rung, and one budget between rungs, planned apart and in any order
    between = max(1, int(share * profile.peak_bytes))
    steps_ms = separate_steps_ms(profile, [*RUNGS, between], seed)
    rungs = {parse_budget(rung, profile.peak_bytes) for rung in RUNGS}
    # THEN no budget is slower than any rung below it
    for small, less_ms in steps_ms.items():
        if small in rungs:
            assert all(more_ms <= less_ms + NOISE_MS for large, more_ms in steps_ms.items() if large > small)


@pytest.mark.parametrize(
    "profile", [chain(7, link=MIDDLING, size_bytes=16), blocks(4), gpt2(layers=5, link=PCIE_16, speed=50)]
)
def test_rungs_of_larger_steps_planned_apart_never_get_slower(profile: Profile) -> None:
    steps_ms = list(separate_steps_ms(profile, ["60%", "65%", "80%", "85%", "90%"]).values())
    assert len(steps_ms) >= 3
    assert all(more_ms <= less_ms + NOISE_MS for less_ms, more_ms in pairwise(steps_ms))


def test_a_rung_whose_plan_is_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a search that is at its best at one rung and, elsewhere, takes the first rule that fits
    of = case(blocks(4))
    good, asked = parse_budget("60%", of.profile.peak_bytes), parse_budget("73%", of.profile.peak_bytes)
    best = make_plan(of.dataflow, good, of.evaluator)
    real = {name: getattr(algorithm, name) for name in ("try_rules", "improve", "_polish")}

    def forgetful(name: str) -> Callable[..., None]:
        def stage(trials: Trials, *arguments: Any) -> None:
            if trials.request.budget_bytes <= good:
                real[name](trials, *arguments)
            elif name == "try_rules":
                trials.run(trials.candidates.all_of("recompute"))

        return stage

    def solve(self: Programs, number: int) -> None:
        self.prove_bound()

    for name in real:
        monkeypatch.setattr(algorithm, name, forgetful(name))
    monkeypatch.setattr(algorithm, "_try_restricted", lambda trials, programs: None)
    monkeypatch.setattr(Programs, "solve", solve)
    request = PlanningRequest(of.dataflow, asked, of.evaluator)
    assert search(request, smaller=False).step_ms > best.step_ms + NOISE_MS
    # WHEN it looks at the rungs below THEN it gets that plan
    assert search(request).step_ms == pytest.approx(best.step_ms)


def test_the_rungs_are_the_same_for_everybody() -> None:
    assert list(rungs_below(1000, 160)) == [150, 100, 50]
    assert list(rungs_below(1000, 150)) == [100, 50]
    assert parse_budget("15%", 1000) in rungs_below(1000, 160)
