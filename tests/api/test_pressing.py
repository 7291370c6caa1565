"""A plan that needs more than the budget, made to be followed under it."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

import pooch
from pooch.api import pressing
from pooch.api.hooked import dataflow_of
from pooch.api.options import PlanOptions
from pooch.api.pressing import plan_under_pressure
from pooch.api.smallest import smallest_with
from pooch.ir import HookCosts, Plan, Profile
from tests.toys import blocks

MISSING_BYTES = 1024
OPTIONS = PlanOptions(region="step", explain=False)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A step with 2 KiB of values that are too small to be decided on."""
    made = blocks(4)
    values = (replace(v, fixed="smaller than 4096 bytes") if v.fixed == "too small" else v for v in made.values)
    return replace(made, values=tuple(values))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    """The smallest plan."""
    return pooch.plan(profile, smallest_with(profile, OPTIONS), region="step", explain=False)


def test_it_passes_the_budget_only_where_its_decisions_cannot_do_with_less(profile: Profile, plan: Plan) -> None:
    budget_bytes = plan.budget_bytes - MISSING_BYTES
    found = plan_under_pressure(profile, plan, budget_bytes, OPTIONS)
    assert found is not None
    assert found.over_bytes == 0
    assert found.moving_ms > 0
    assert found.plan.decisions == plan.decisions
    assert found.plan.budget_bytes == found.plan.predicted_peak_bytes == plan.budget_bytes
    timeline = pooch.simulate(profile, found.plan)
    assert (timeline.peak_bytes, timeline.step_ms) == (found.plan.predicted_peak_bytes, found.plan.predicted_step_ms)
    least = pooch.plan_from_decisions(profile, plan.decisions, region="step")
    over = numpy.flatnonzero(timeline.point_bytes > budget_bytes)
    assert set(over) <= set(numpy.flatnonzero(pooch.simulate(profile, least).point_bytes > budget_bytes))
    assert found.plan.notes[-1].endswith("where it needs more: what it keeps leaves to make up for that")
    again = plan_under_pressure(profile, found.plan, budget_bytes, OPTIONS)
    assert again is not None
    assert again.plan.schedule == found.plan.schedule


def test_where_more_is_missing_than_can_leave_a_step_without_a_plan_has_to_be_no_better(
    profile: Profile, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = plan.budget_bytes // 2
    found = plan_under_pressure(profile, plan, budget_bytes, OPTIONS)
    assert found is not None
    assert found.over_bytes > 0
    least_bytes = budget_bytes + found.over_bytes
    for bytes_, is_followed in ((least_bytes, True), (least_bytes - 1, False)):
        monkeypatch.setattr(pressing, "least_bytes", lambda _, bytes_=bytes_: bytes_)
        assert (plan_under_pressure(profile, plan, budget_bytes, OPTIONS) is not None) == is_followed


def test_it_is_not_followed_if_a_step_without_a_plan_is_faster(profile: Profile, plan: Plan) -> None:
    # GIVEN a plan that replays, where a step without one knows better
    dataflow = dataflow_of(profile, "step", hooked=True)
    replayed = next(value.id for value in dataflow.activations if dataflow.refusal(value.id) is None)
    decisions = {**plan.decisions, replayed: "recompute"}
    replaying = pooch.plan_from_decisions(profile, decisions, region="step")
    budget_bytes = replaying.budget_bytes - MISSING_BYTES
    slow = replace(profile, hooks=HookCosts(replay_ms=plan.predicted_step_ms))
    without_ms = pressing.run_online(dataflow_of(slow, "step", hooked=True), budget_bytes).step_ms
    assert pooch.simulate(slow, replaying).step_ms > without_ms
    assert plan_under_pressure(slow, replaying, budget_bytes, OPTIONS) is None
    assert plan_under_pressure(profile, replaying, budget_bytes, OPTIONS) is not None


def test_the_tier_has_to_have_room_for_what_leaves_in_addition(profile: Profile, plan: Plan) -> None:
    budget_bytes = plan.budget_bytes - MISSING_BYTES
    host_bytes = plan.schedule.host_bytes
    for more_bytes, is_followed in ((3 * 4096, True), (0, False)):
        options = replace(OPTIONS, host_budget=host_bytes + more_bytes)
        assert (plan_under_pressure(profile, plan, budget_bytes, options) is not None) == is_followed
