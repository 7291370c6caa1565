"""The plan against an oracle that tries every decision through the real lowering and simulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pooch.errors import InfeasibleBudget
from pooch.ir import HookCosts, Link, Profile
from tests.planner.shapes import SHAPES as STEPS
from tests.planner.support import Case, all_decisions, case, make_plan, oracle_ms, oracle_peak
from tests.toys import FAST_LINK, SLOW_LINK, ToyStep, blocks, chain, ladder, profiles

NO_HOOKS, HOOKS = HookCosts(), HookCosts(0.0, 0.3, 0.5)
MIDDLING = Link("toy tier", 0.1, 0.1, 8.0, 8.0, full_duplex=False, out_compute_share=0.25, in_compute_share=0.5)


def unequal_chain(link: Link) -> Profile:
    """Six saved values of different sizes, costs and one that cannot be replayed."""
    step = ToyStep()
    current = step.external(4)
    for place, (size_bytes, time_ms) in enumerate([(40, 1.0), (8, 4.0), (24, 0.5), (16, 2.0), (32, 8.0), (8, 1.0)]):
        (current,) = step.op(
            [current], [size_bytes], saves=[current], saves_outputs=[0], time_ms=time_ms, backward_ms=2 * time_ms,
            refusal="it draws noise" if place == 3 else None,
        )  # fmt: skip
    return step.build(link)


SHAPES = {
    "chain": chain(6, link=MIDDLING, size_bytes=16),
    "chain, slow link": chain(6, link=SLOW_LINK, size_bytes=160),
    "chain with unsaved ops": chain(5, link=MIDDLING, size_bytes=16, unsaved_between=2, workspace_bytes=8),
    "ladder": ladder(3, size_bytes=32, link=MIDDLING),
    "unequal": unequal_chain(MIDDLING),
    "unequal, fast link": unequal_chain(FAST_LINK),
    "blocks": blocks(2),
}


def budget_between(of: Case, share: float) -> int:
    """A budget between the smallest peak there is and the in-core peak."""
    low = oracle_peak(of)
    return int(low + share * (of.profile.peak_bytes - low))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_plan_is_within_one_percent_of_the_best_there_is(shape: str, share: float) -> None:
    # GIVEN a small profile and a budget that binds
    of = case(SHAPES[shape])
    budget_bytes = budget_between(of, share)
    best_ms = oracle_ms(of, budget_bytes)
    assert best_ms is not None
    # WHEN it is planned
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    # THEN the plan fits, is as good as any, and its bound is below all
    assert planned.timeline.peak_bytes <= budget_bytes
    assert planned.timeline.step_ms <= best_ms * 1.01
    assert planned.lower_bound_ms <= best_ms + 1e-6


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(profiles(max_ops=9), st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_random_steps_are_planned_as_well_as_the_oracle_does(profile: Profile, share: float) -> None:
    of = case(profile)
    assume(2 <= len(of.dataflow.activations) <= 5)
    budget_bytes = budget_between(of, share)
    assume(budget_bytes < profile.peak_bytes)
    best_ms = oracle_ms(of, budget_bytes)
    try:
        planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    except InfeasibleBudget:
        assert best_ms is None
        return
    assert planned.timeline.peak_bytes <= budget_bytes
    if best_ms is not None:
        assert planned.lower_bound_ms <= best_ms + 1e-6
        assert planned.timeline.step_ms <= best_ms * 1.01


@pytest.mark.parametrize(("seed", "hooks"), [*((seed, NO_HOOKS) for seed in range(4)), (4, HOOKS), (5, HOOKS)])
@pytest.mark.parametrize("shape", sorted(STEPS))
def test_every_shape_is_planned_as_well_as_all_decisions_allow(shape: str, seed: int, hooks: HookCosts) -> None:
    # GIVEN a random step of the shape (`benchmarks.oracle_sweep` tries many more, and longer ones)
    random = Random(f"{shape} {seed}")
    of = case(replace(STEPS[shape](random, 4 if shape == "mixed" else 6), hooks=hooks))
    low = min(of.evaluator.evaluate(decisions, 1).timeline.peak_bytes for decisions in all_decisions(of.dataflow))
    budget_bytes = int(low + random.choice([0.0, 0.25, 0.5, 0.75]) * (of.profile.peak_bytes - low))
    best_ms = oracle_ms(of, budget_bytes)
    # WHEN it is planned
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    # THEN nothing is better by more than 1%, and the bound is below all
    assert planned.timeline.peak_bytes <= budget_bytes
    assert best_ms is not None
    assert planned.timeline.step_ms <= best_ms * 1.01
    assert planned.lower_bound_ms <= best_ms + 1e-6


def test_host_budget_is_kept_and_planned_as_well_as_the_oracle_does() -> None:
    # GIVEN a tier that holds two of six pages (each value takes one page of 4096 bytes there)
    of = case(chain(6, link=FAST_LINK, size_bytes=4096))
    budget_bytes, host_bytes = budget_between(of, 0.3), 2 * 4096
    best_ms = oracle_ms(of, budget_bytes, host_bytes)
    assert best_ms is not None
    unlimited = make_plan(of.dataflow, budget_bytes, of.evaluator)
    assert unlimited.schedule.host_bytes > host_bytes, "without a host budget more is swapped"
    # WHEN it is planned under that host budget
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator, host_budget_bytes=host_bytes)
    # THEN it is kept, at a price, and the rest is recomputed
    assert planned.schedule.host_bytes <= host_bytes
    assert planned.timeline.peak_bytes <= budget_bytes
    assert planned.lower_bound_ms <= best_ms + 1e-6
    assert planned.timeline.step_ms <= best_ms * 1.01
    assert "recompute" in planned.decisions.values()
