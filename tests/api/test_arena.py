"""Plans whose arena is within the budget: always, by an independent count, and still with a correct schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.arena_fitting import ArenaFitting
from pooch.api.evaluation import StageEvaluator
from pooch.errors import FileFormatError, InfeasibleBudget, InvalidSchedule, UsageError
from pooch.ir import Plan, Profile
from pooch.ir.executable import check_executable
from pooch.ir.layout import StepLayout
from pooch.packing import bound_of, verify
from pooch.planner import PolicyOutcome
from tests import toys

SCALE = 4096  # so that what alignment wastes is small beside the values, as in real steps


def scaled(profile: Profile) -> Profile:
    """The same step with every size multiplied."""
    values = tuple(
        replace(v, size_bytes=v.size_bytes * SCALE, allocated_bytes=v.allocated_bytes * SCALE) for v in profile.values
    )
    ops = tuple(replace(op, entry_bytes=op.entry_bytes * SCALE, peak_bytes=op.peak_bytes * SCALE) for op in profile.ops)
    rate = profile.link.out_bytes_per_ms * SCALE, profile.link.in_bytes_per_ms * SCALE
    link = replace(profile.link, out_bytes_per_ms=rate[0], in_bytes_per_ms=rate[1])
    peak_bytes, persistent_bytes = profile.peak_bytes * SCALE, profile.persistent_bytes * SCALE
    return replace(profile, values=values, ops=ops, link=link, peak_bytes=peak_bytes, persistent_bytes=persistent_bytes)


def top_by_hand(layout: StepLayout) -> int:
    """The end of the highest block; no two may meet, as found by comparing all pairs."""
    blocks = [block for block in layout.blocks if block.size_bytes]
    for a, b in combinations(blocks, 2):
        in_time = a.lower < b.upper and b.lower < a.upper
        assert not (in_time and a.offset < b.offset + b.size_bytes and b.offset < a.offset + a.size_bytes)
    return max((block.offset + block.size_bytes for block in blocks), default=0)


def planned(profile: Profile, budget: int | str, **options: object) -> Plan:
    shared = {"region": "step", "effort": "fast", "explain": False, "time_limit_s": 20.0}
    return pooch.plan(profile, budget, bound="arena", **(shared | options))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(toys.profiles().map(scaled), st.floats(0.0, 1.0))
def test_the_arena_is_within_the_budget_or_there_is_no_plan(profile: Profile, share: float) -> None:
    least = pooch.smallest_budget(profile, region="step")
    budget_bytes = max(1, int(least + (profile.peak_bytes * 1.05 - least) * share))
    try:
        plan = planned(profile, budget_bytes)
    except InfeasibleBudget:
        event("infeasible")
        return
    layout = plan.layout
    assert layout is not None
    assert layout.outside_bytes + top_by_hand(layout) == layout.total_bytes <= budget_bytes
    verify([block.block for block in layout.blocks], layout.layout)
    timeline = pooch.simulate(profile, plan)  # passes the verifier of schedules
    assert layout.outside_bytes + bound_of([block.block for block in layout.blocks]) == timeline.peak_bytes
    assert timeline.peak_bytes == plan.predicted_peak_bytes <= layout.total_bytes
    assert plan.predicted_step_ms >= plan.lower_bound_ms - 1e-6
    event("in-core" if not plan.schedule.actions else "planned")
    if any("fitting the arena" in note for note in plan.notes):
        event("fitted")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(toys.profiles().map(scaled))
def test_the_smallest_arena_budget_has_a_plan(profile: Profile) -> None:
    plan = planned(profile, "min")
    assert plan.layout is not None
    assert plan.layout.total_bytes <= plan.budget_bytes


@pytest.fixture(scope="module")
def tight() -> tuple[Profile, Plan]:
    profile = toys.blocks(6, link=toys.DISK_LINK)
    return profile, planned(profile, "min")


def test_a_plan_keeps_its_layout_in_its_file(tight: tuple[Profile, Plan], tmp_path: Path) -> None:
    tight[1].save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.bound, loaded.layout) == ("arena", tight[1].layout)


def test_a_file_with_another_offset_is_refused(tight: tuple[Profile, Plan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    tight[1].save(path)
    content = json.loads(path.read_text())
    content["layout"]["blocks"][1]["offset"] = content["layout"]["blocks"][0]["offset"]
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match=r"overlap at time|end at"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: replace(plan, layout=None), "no layout"),
        (lambda plan: replace(plan, budget_bytes=plan.predicted_peak_bytes - 1), "over the budget"),
        (lambda plan: replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes + 1), "another peak"),
        (lambda plan: replace(plan, layout=replace(plan.layout, arena_bytes=1)), "the arena at 1"),
        (lambda plan: replace(plan, layout=replace(plan.layout, outside_bytes=-1)), "negative"),
        (lambda plan: _with_block(plan, upper=0), "lifetime"),
        (lambda plan: _with_block(plan, alignment_bytes=0), "aligned"),
    ],
)
def test_a_changed_layout_is_not_executed(tight: tuple[Profile, Plan], change: object, words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        check_executable(change(tight[1]))  # type: ignore[operator]


def _with_block(plan: Plan, **changed: int) -> Plan:
    assert plan.layout is not None
    blocks = (replace(plan.layout.blocks[0], **changed), *plan.layout.blocks[1:])
    return replace(plan, layout=replace(plan.layout, blocks=blocks))


def test_a_plan_that_takes_more_of_the_tier_than_it_may_does_not_fit() -> None:
    dataflow = Dataflow(toys.blocks(6, link=toys.FAST_LINK))
    evaluator = StageEvaluator(dataflow)
    swaps = toys.some_decisions(dataflow, "s")
    outcome = PolicyOutcome(swaps, evaluator.evaluate(swaps, 0), 0.0)
    host_bytes = outcome.schedule.host_bytes
    assert ArenaFitting(evaluator, 1 << 40, host_bytes).as_it_is(outcome) is not None
    assert ArenaFitting(evaluator, 1 << 40, host_bytes - 1).as_it_is(outcome) is None


def test_there_are_two_bounds() -> None:
    with pytest.raises(UsageError, match="live or arena"):
        pooch.plan(toys.chain(3), "100%", bound="both")  # type: ignore[arg-type]


def test_a_plan_for_live_bytes_has_no_layout() -> None:
    plan = pooch.plan(toys.blocks(4), "100%", region="step", effort="fast")
    assert (plan.bound, plan.layout) == ("live", None)
