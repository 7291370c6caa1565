"""The composition of the stages: budgets in, verified and self-contained plans out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import pooch
from pooch import planner
from pooch.api.evaluation import StageEvaluator
from pooch.api.manual import plan_from_decisions
from pooch.api.measure.comparison import compare, policy_names
from pooch.api.simulation import simulate_in_core
from pooch.errors import InfeasibleBudget, InvalidSchedule, PlanMismatch, UsageError
from pooch.ir import Link
from tests.planner.support import leave_no_time
from tests.toys import FAST_LINK, blocks, chain, ladder


def test_a_plan_keeps_its_budget_in_the_simulator() -> None:
    profile = blocks(4, link=FAST_LINK)
    plan = pooch.plan(profile, "60%")
    timeline = pooch.simulate(profile, plan)
    assert plan.budget_bytes == int(0.6 * profile.peak_bytes)
    assert timeline.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert timeline.step_ms == pytest.approx(plan.predicted_step_ms)
    assert set(plan.decisions) == {value.id for value in profile.activations}
    assert {"swap", "recompute"} & set(plan.decisions.values())


def test_a_plan_carries_what_the_runtime_expects() -> None:
    profile = blocks(2)
    plan = pooch.plan(profile, "100%")
    assert [op.fingerprint for op in plan.expected] == [op.fingerprint for op in profile.ops[: profile.forward_ops]]
    assert plan.first_slot == profile.model_begin == 0
    assert set(plan.decisions.values()) == {"keep"}
    assert not plan.schedule.actions


def test_the_region_of_the_model_leaves_the_loss_alone() -> None:
    profile = replace(chain(5), model_begin=1, model_end=4)
    plan = pooch.plan(profile, "100%")
    assert plan.first_slot == 1
    assert len(plan.expected) == 3
    assert pooch.plan(profile, "100%", region="step").first_slot == 0


@pytest.mark.parametrize("budget", ["many", "", "-3", "0", 0, -1, "0%", "5 parsecs", 2.5, True])
def test_budgets_that_cannot_be_understood(budget: object) -> None:
    with pytest.raises(UsageError, match="budget"):
        pooch.plan(chain(3), budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"policy": "magic"}, "no policy 'magic'"),
        ({"region": "moon"}, "no region 'moon'"),
        ({"time_limit_s": 0}, "time limit"),
        ({"time_limit_s": float("nan")}, "time limit"),
        ({"host_budget": "much"}, "host budget"),
    ],
)
def test_other_arguments_that_cannot_be_understood(keywords: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        pooch.plan(chain(3), "100%", **keywords)  # type: ignore[arg-type]


def test_an_impossible_budget_names_a_possible_one() -> None:
    profile = blocks(3)
    with pytest.raises(InfeasibleBudget) as caught:
        pooch.plan(profile, "5%")
    assert caught.value.minimum_bytes > caught.value.budget_bytes
    assert pooch.plan(profile, caught.value.minimum_bytes).predicted_peak_bytes <= caught.value.minimum_bytes


def test_decisions_by_hand_are_carried_out() -> None:
    profile = chain(6, size_bytes=100)
    first, second = profile.activations[1], profile.activations[2]
    plan = plan_from_decisions(profile, {first.id: "recompute", second.id: "swap"})
    assert plan.status == "manual"
    assert plan.decisions[first.id] == "recompute"
    assert plan.schedule.recomputed == (first.id,)
    assert plan.schedule.swapped == (second.id,)
    assert plan.predicted_peak_bytes < profile.peak_bytes


def test_decisions_by_hand_that_do_not_fit_name_what_they_need() -> None:
    profile = chain(6, size_bytes=100)
    chosen = {profile.activations[1].id: "recompute"}
    with pytest.raises(InfeasibleBudget) as caught:
        plan_from_decisions(profile, chosen, 50)
    assert plan_from_decisions(profile, chosen, caught.value.minimum_bytes).status == "manual"


@pytest.mark.parametrize(
    ("decisions", "told"), [({999: "keep"}, "not an activation"), ({2: "burn"}, "none of keep, swap, recompute")]
)
def test_decisions_that_make_no_sense(decisions: dict[int, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan_from_decisions(chain(4), decisions)  # type: ignore[arg-type]


def test_a_plan_of_another_model_is_refused() -> None:
    plan = pooch.plan(chain(4), "100%")
    with pytest.raises(PlanMismatch, match="another model"):
        pooch.simulate(replace(chain(4), model_signature="other"), plan)
    with pytest.raises(PlanMismatch, match="4 forward ops, not 5"):
        pooch.simulate(chain(5), plan)


def test_a_schedule_changed_by_hand_is_not_simulated() -> None:
    profile = chain(6, size_bytes=100)
    plan = plan_from_decisions(profile, {profile.activations[1].id: "swap"})
    actions = tuple(action for action in plan.schedule.actions if action.kind != "copy_in")
    with pytest.raises(InvalidSchedule):
        pooch.simulate(profile, replace(plan, schedule=replace(plan.schedule, actions=actions)))


def broken(evaluation: Any, kind: str) -> Any:
    """The same without one action of a kind."""
    actions = list(evaluation.schedule.actions)
    actions.remove(next(action for action in actions if action.kind == kind))
    return replace(evaluation, schedule=replace(evaluation.schedule, actions=tuple(actions)))


@pytest.mark.parametrize("kind", ["copy_out", "wait", "replay"])
def test_what_the_planner_gives_is_not_believed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan would be executed blindly, so whatever a policy has made of it is walked through once more."""
    profile = blocks(4, link=FAST_LINK)
    make = planner.make_plan
    policy = "recompute_all" if kind == "replay" else "swap_all"
    assert kind in {action.kind for action in pooch.plan(profile, "60%", policy=policy).schedule.actions}

    def forged(*args: Any, **named: Any) -> Any:
        planned = make(*args, **named)
        return replace(planned, evaluation=broken(planned.evaluation, kind))

    monkeypatch.setattr(planner, "make_plan", forged)
    with pytest.raises(InvalidSchedule) as told:
        pooch.plan(profile, "60%", policy=policy)
    assert "\n" not in str(told.value)


def test_a_schedule_over_the_budget_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner believes its evaluator; here one that lowers for more than there is, and says that it fits."""
    profile = blocks(4, link=FAST_LINK)
    make = planner.make_plan

    def generous(request: planner.PlanningRequest, *args: Any, **named: Any) -> Any:
        more_bytes = request.budget_bytes + profile.peak_bytes // 10
        return make(replace(request, budget_bytes=more_bytes), *args, **named)

    monkeypatch.setattr(planner, "make_plan", generous)
    with pytest.raises(InvalidSchedule, match="over the budget of"):
        pooch.plan(profile, "60%")


def test_decisions_by_hand_are_not_believed_either(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = chain(6, size_bytes=100)
    evaluate = StageEvaluator.evaluate
    monkeypatch.setattr(StageEvaluator, "evaluate", lambda *given: broken(evaluate(*given), "wait"))
    with pytest.raises(InvalidSchedule):
        plan_from_decisions(profile, {profile.activations[1].id: "swap"})


def test_comparing_has_a_row_for_every_policy_and_budget() -> None:
    profile = blocks(3, link=FAST_LINK)
    rows = compare(profile, ["100%", "60%"])
    assert len(rows) == 2 * len(policy_names())
    assert len(set(policy_names())) == len(policy_names())
    by_name = {(row.policy, row.budget_bytes): row for row in rows}
    kept = by_name["keep_all", int(0.6 * profile.peak_bytes)]
    assert kept.plan is None
    assert kept.minimum_bytes == profile.peak_bytes
    best = by_name["ilp", int(0.6 * profile.peak_bytes)].plan
    assert best is not None
    others = [row.plan.predicted_step_ms for row in rows if row.plan and row.budget_bytes == best.budget_bytes]
    assert best.predicted_step_ms <= min(others) + 1e-9


def test_a_comparison_never_gets_slower_with_memory_whatever_the_order_of_budgets() -> None:
    rows = compare(blocks(4, link=FAST_LINK), ["83%", "57%", "71%", "58%"], policies=["ilp", "swap_all"])
    assert [row.policy for row in rows] == ["ilp", "swap_all"] * 4
    found = sorted((row.budget_bytes, row.plan.predicted_step_ms) for row in rows if row.plan and row.policy == "ilp")
    assert len(found) == 4
    assert all(more_ms <= less_ms + 1e-6 for (_, less_ms), (_, more_ms) in pairwise(found))


def test_known_plans_are_made_use_of_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ladder(5, size_bytes=64, link=Link("toy tier", 0.1, 0.1, 8.0, 8.0, full_duplex=False))
    good = pooch.plan(profile, "80%")
    # GIVEN a clock that stands where every time limit has passed, however quick the machine is
    leave_no_time(monkeypatch)
    hurried = pooch.plan(profile, "83%")
    assert hurried.predicted_step_ms > good.predicted_step_ms
    knowing = pooch.plan(profile, "83%", known=[good])
    assert knowing.predicted_step_ms == pytest.approx(good.predicted_step_ms)
    with pytest.raises(PlanMismatch):
        pooch.plan(blocks(5), "80%", known=[good])


def test_the_in_core_step_is_simulated_as_it_was_measured() -> None:
    profile = blocks(2)
    timeline = simulate_in_core(profile)
    assert timeline.peak_bytes == profile.peak_bytes
    assert timeline.step_ms == pytest.approx(profile.step_ms)
