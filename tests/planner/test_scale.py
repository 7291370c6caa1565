"""Many activations: planned as classes of repeated blocks, with a bound, and no worse than plain policies.

How long that takes is measured by `python -m benchmarks.planner_growth`.
"""

from __future__ import annotations

import pytest

from pooch.errors import InfeasibleBudget
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import Case, case, make_plan


def policy_ms(of: Case, budget_bytes: int, policy: str) -> float:
    try:
        return make_plan(of.dataflow, budget_bytes, of.evaluator, policy=policy).timeline.step_ms
    except InfeasibleBudget:
        return float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "share"), [(80, 0.35), (80, 0.6), (370, 0.45)])
def test_long_language_models_are_planned_with_small_gaps(layers: int, share: float) -> None:
    # GIVEN a language model of 27 activations a layer
    of = case(gpt2(layers=layers, link=PCIE_16, speed=50, fine=True))
    assert len(of.dataflow.activations) >= 27 * layers
    # WHEN it is planned, with time enough on the busiest machine
    planned = make_plan(of.dataflow, of.share(share), of.evaluator, time_limit_s=1000.0)
    # THEN the gap is small, and no plain policy is faster
    assert planned.timeline.peak_bytes <= of.share(share)
    assert planned.gap <= 0.01
    for policy in ("swap_all", "recompute_all"):
        assert planned.timeline.step_ms <= policy_ms(of, of.share(share), policy)
