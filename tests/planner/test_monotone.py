"""More memory is never slower: exactly where plans know those of smaller budgets, within the gap where they do not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings

from pooch.ir import Link, Profile
from pooch.planner import make_plan, make_plans
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import case
from tests.toys import blocks, chain, profiles

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NOISE_MS = 1e-6
MIDDLING = Link("toy tier", 0.1, 0.1, 8.0, 8.0, full_duplex=False, out_compute_share=0.25, in_compute_share=0.5)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(profiles(max_ops=12))
def test_a_row_of_budgets_never_gets_slower(profile: Profile) -> None:
    of = case(profile)
    assume(len(of.dataflow.activations) >= 2)
    plans = make_plans(of.dataflow, [of.share(share) for share in SHARES], of.evaluator)
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


def test_a_known_plan_is_the_answer_where_nothing_better_is_found() -> None:
    # GIVEN a plan under a smaller budget, and no time to search
    of = case(gpt2(layers=4, link=PCIE_16, speed=50))
    good = make_plan(of.dataflow, of.share(0.7), of.evaluator)
    hurried = make_plan(of.dataflow, of.share(0.75), of.evaluator, time_limit_s=0.001, known=[good])
    assert hurried.timeline.step_ms <= good.timeline.step_ms + NOISE_MS
