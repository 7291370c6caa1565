"""A run without a plan as a policy: its last choices, made into a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Link, OnlineStep
from pooch.planner.policies.online import told
from pooch.published.policies.dtr import dtr
from pooch.simulator import run_online
from tests.planner.support import RealEvaluator, case, make_plan
from tests.toys import blocks, chain

LINK = Link("toy tier", 0.0, 0.0, 16.0, 16.0)


@pytest.mark.parametrize("policy", ["online", "dtr", "dtr_eq"])
def test_the_plan_is_that_of_the_last_choices_and_tells_what_the_run_took(policy: str) -> None:
    of = case(chain(12, size_bytes=16, link=Link("slow", 0.0, 0.0, 1.0, 1.0)))
    plan = make_plan(of.dataflow, of.share(0.6), of.evaluator, policy=policy)
    assert plan.timeline.peak_bytes <= of.share(0.6)
    assert "recompute" in plan.decisions.values()
    assert "swap" not in plan.decisions.values()
    assert any("evicting while it runs takes" in note for note in plan.notes)


def test_ours_copies_where_the_link_is_fast_and_dtr_never_does() -> None:
    of = case(chain(12, size_bytes=16, link=Link("fast", 0.0, 0.0, 160.0, 160.0)))
    ours, dtr = (make_plan(of.dataflow, of.share(0.6), of.evaluator, policy=policy) for policy in ("online", "dtr"))
    assert set(ours.decisions.values()) == {"keep", "swap"}
    assert set(dtr.decisions.values()) == {"keep", "recompute"}


def test_the_note_is_of_the_run_and_the_plan_knows_more() -> None:
    of = case(blocks(4, link=LINK))
    budget_bytes = of.share(0.7)
    run = run_online(of.dataflow, budget_bytes)
    plan = make_plan(of.dataflow, budget_bytes, of.evaluator, policy="online")
    assert run.feasible
    assert plan.notes == (told(run),)
    assert plan.step_ms <= run.step_ms
    leaving = {value for value, choice in plan.decisions.items() if choice != "keep"}
    assert leaving <= {value for value, choice in run.decisions.items() if choice != "keep"}


def test_without_any_room_in_the_tier_nothing_is_copied() -> None:
    of = case(chain(12, size_bytes=16, link=Link("fast", 0.0, 0.0, 160.0, 160.0)))
    plan = make_plan(of.dataflow, of.share(0.6), of.evaluator, policy="online", host_budget_bytes=0)
    assert set(plan.decisions.values()) == {"keep", "recompute"}


def test_a_budget_that_the_run_exceeds_is_refused_with_one_that_it_keeps() -> None:
    of = case(chain(12, size_bytes=16, link=LINK))
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(of.dataflow, of.share(0.1), of.evaluator, policy="dtr")
    assert raised.value.policy == "dtr"
    assert run_online(of.dataflow, raised.value.minimum_bytes, None, dtr.rule).feasible


def test_a_run_over_the_budget_is_no_plan_even_where_its_choices_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(chain(12, size_bytes=16, link=LINK))

    def needs_more(evaluator: RealEvaluator, budget_bytes: int, *others: Any) -> OnlineStep:
        run = run_online(evaluator.dataflow, budget_bytes, *others)
        return replace(run, over_bytes=max(0, of.share(0.9) - budget_bytes))

    monkeypatch.setattr(RealEvaluator, "run_online", needs_more)
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(of.dataflow, of.share(0.6), of.evaluator, policy="online")
    assert raised.value.minimum_bytes >= of.share(0.9)


def test_the_options_of_dtr() -> None:
    of = case(chain(30, size_bytes=16, link=LINK))
    plans = [
        make_plan(of.dataflow, of.share(0.5), of.evaluator, policy="dtr", policy_options=options)
        for options in ({}, {"samples": "1"}, {"neighbourhood": "eq"})
    ]
    assert plans[1].decisions != plans[0].decisions
    assert plans[2].decisions == make_plan(of.dataflow, of.share(0.5), of.evaluator, policy="dtr_eq").decisions
    with pytest.raises(UsageError, match="give exact or eq"):
        make_plan(of.dataflow, of.share(0.5), of.evaluator, policy="dtr", policy_options={"neighbourhood": "near"})
