"""What planning promises whatever the profile: it fits, it is told why, it repeats itself, it says when it cannot."""

from __future__ import annotations

import pulp
import pytest

from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Decisions, Link
from pooch.planner import Evaluation, PlanningRequest, find_policy
from tests.planner.networks import MIB, PCIE_16, SPILL_FILE, gpt2, resnet50
from tests.planner.support import Case, RealEvaluator, case, leave_no_time, make_plan, oracle_peak
from tests.toys import SLOW_LINK, ToyStep, blocks, chain, ladder

LINK = Link("toy tier", 0.1, 0.1, 8.0, 8.0)


def small() -> Case:
    return case(chain(6, link=LINK, size_bytes=16))


def test_slack_budget_keeps_everything_at_the_in_core_time() -> None:
    # GIVEN a budget of exactly the in-core peak
    of = small()
    # WHEN it is planned
    planned = make_plan(of.dataflow, of.profile.peak_bytes, of.evaluator)
    # THEN nothing moves, and that is proven to be optimal
    assert set(planned.decisions.values()) == {"keep"}
    assert planned.schedule.actions == ()
    assert planned.timeline.step_ms == pytest.approx(of.profile.step_ms)
    assert (planned.status, planned.gap, planned.lower_bound_ms) == ("optimal", 0.0, planned.timeline.step_ms)
    assert of.evaluator.count == 1, "there is nothing to search"


def test_binding_budget_moves_something_and_stays_within() -> None:
    of = small()
    planned = make_plan(of.dataflow, of.profile.peak_bytes - 1, of.evaluator)
    assert planned.timeline.peak_bytes < of.profile.peak_bytes
    assert set(planned.decisions.values()) > {"keep"}
    assert planned.timeline.step_ms >= planned.lower_bound_ms >= of.profile.step_ms - 1e-9
    assert planned.gap == pytest.approx(1 - planned.lower_bound_ms / planned.timeline.step_ms)


@pytest.mark.parametrize("profile", [chain(6, link=LINK), ladder(3, link=LINK), blocks(2), chain(5, link=SLOW_LINK)])
def test_infeasible_budget_names_the_smallest_that_is_feasible(profile) -> None:
    # GIVEN a budget that nothing fits into
    of = case(profile)
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(of.dataflow, 1, of.evaluator)
    minimum_bytes = raised.value.minimum_bytes
    # THEN the minimum can be planned, one byte less cannot, and no decisions at all go below it
    planned = make_plan(of.dataflow, minimum_bytes, of.evaluator)
    assert planned.timeline.peak_bytes <= minimum_bytes
    with pytest.raises(InfeasibleBudget) as again:
        make_plan(of.dataflow, minimum_bytes - 1, of.evaluator)
    assert again.value.minimum_bytes == minimum_bytes
    assert oracle_peak(of) == minimum_bytes


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all", "swap_all"])
def test_minimum_of_a_plain_policy_is_its_own(policy: str) -> None:
    of = small()
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(of.dataflow, 1, of.evaluator, policy=policy)
    assert raised.value.policy == policy
    planned = make_plan(of.dataflow, raised.value.minimum_bytes, of.evaluator, policy=policy)
    assert planned.timeline.peak_bytes <= raised.value.minimum_bytes


def test_plain_policies_do_what_their_names_say() -> None:
    of = small()
    peak_bytes = of.profile.peak_bytes
    kept = make_plan(of.dataflow, peak_bytes, of.evaluator, policy="keep_all")
    replayed = make_plan(of.dataflow, peak_bytes, of.evaluator, policy="recompute_all")
    least = make_plan(of.dataflow, oracle_peak(of), of.evaluator, policy="swap_all")
    assert set(kept.decisions.values()) == {"keep"}
    assert list(replayed.decisions.values()).count("recompute") >= 4
    assert replayed.timeline.replay_ms > 0
    assert list(least.decisions.values()).count("swap") >= 4
    assert replayed.status == "heuristic"


def test_swap_all_keeps_what_the_tier_cannot_hold() -> None:
    of = case(chain(6, link=LINK, size_bytes=4096))
    planned = make_plan(of.dataflow, of.profile.peak_bytes, of.evaluator, policy="swap_all", host_budget_bytes=2 * 4096)
    assert planned.schedule.host_bytes <= 2 * 4096
    assert any("host budget" in note for note in planned.notes)


def test_aliases_and_unknown_names() -> None:
    of = small()
    assert find_policy("in_core") is find_policy("keep_all")
    with pytest.raises(UsageError, match=r"no policy 'magic'.*ilp"):
        make_plan(of.dataflow, 100, of.evaluator, policy="magic")


def test_same_inputs_give_the_same_plan() -> None:
    of, again = case(resnet50(batch_size=8)), case(resnet50(batch_size=8))
    budget_bytes = of.share(0.6)
    first = make_plan(of.dataflow, budget_bytes, of.evaluator)
    second = make_plan(again.dataflow, budget_bytes, again.evaluator)
    assert (first.decisions, first.schedule, first.lower_bound_ms) == (
        second.decisions,
        second.schedule,
        second.lower_bound_ms,
    )


def test_decisions_lower_to_the_schedule_that_was_planned() -> None:
    # swaps that never had to leave are told as kept, so the same decisions give the same schedule again
    of = case(gpt2(layers=2, link=PCIE_16))
    budget_bytes = of.share(0.85)
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    assert of.evaluator.evaluate(planned.decisions, budget_bytes).schedule == planned.schedule
    assert {value for value, choice in planned.decisions.items() if choice == "swap"} == set(planned.schedule.swapped)


def test_every_activation_has_a_reason_in_numbers() -> None:
    # GIVEN a value that cannot be replayed among others
    step = ToyStep()
    current = step.external(4 * MIB)
    for place in range(6):
        refusal = "it draws noise" if place == 2 else None
        (current,) = step.op([current], [4 * MIB], saves=[current], refusal=refusal, time_ms=1.0 + place)
    of = case(step.build(Link("tier", 0.0, 0.0, 2.0 * MIB, 2.0 * MIB)))
    # WHEN it is planned at its smallest
    planned = make_plan(of.dataflow, oracle_peak(of), of.evaluator)
    # THEN each row says what was chosen, what it costs and what it frees
    assert [row.value for row in planned.rows] == list(planned.decisions)
    for row in planned.rows:
        assert row.reason.startswith(f"{row.choice}: ")
        assert "4.00 MiB" in row.reason
        assert ",;" not in row.reason
        assert row.copy_ms == pytest.approx(4.0)
    # AND what the others would have cost: the step with one choice changed is what the evaluator says it is
    row = next(row for row in planned.rows if row.choice != "keep" and row.keep_change_ms is not None)
    assert row.keep_change_ms == float("inf"), "at the smallest budget nothing more can be kept"
    assert "; keep: " in row.reason
    assert row.reason.endswith(" too much") or " too much; " in row.reason
    tried = [
        row for row in planned.rows if row.choice == "recompute" and row.swap_change_ms not in (None, float("inf"))
    ]
    for row in tried:
        swapped = of.evaluator.evaluate({**planned.decisions, row.value: "swap"}, oracle_peak(of)).timeline
        assert swapped.step_ms - planned.timeline.step_ms == pytest.approx(row.swap_change_ms)
        assert row.recompute_change_ms == 0.0
    # AND there are numbers for each activation that has a choice
    assert all(row.keep_change_ms is not None for row in planned.rows)
    no_swap = [row for row in planned.rows if row.swap_change_ms is None]
    assert no_swap == [planned.rows[-1]], "the last value is read again as soon as it is released"
    assert all(row.recompute_change_ms is None for row in planned.rows if row.value == 3)
    noisy = next(row for row in planned.rows if row.value == 3)
    assert noisy.replay_ms != noisy.replay_ms, "not a number: it cannot be replayed"
    assert "it draws noise" in noisy.reason or noisy.choice == "keep"


def test_missing_solver_gives_the_plan_of_a_rule_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(resnet50(link=PCIE_16, speed=50))
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    planned = make_plan(of.dataflow, of.share(0.4), of.evaluator)
    assert planned.status == "heuristic"
    assert any("pip install highspy" in note for note in planned.notes)
    assert planned.timeline.peak_bytes <= of.share(0.4)


def test_progress_is_told_in_order() -> None:
    of = case(resnet50(batch_size=8))
    told: list[float] = []
    make_plan(of.dataflow, of.share(0.6), of.evaluator, progress=lambda text, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) >= 3


@pytest.mark.parametrize("make", [resnet50, gpt2])
def test_networks_are_planned_with_small_gaps_and_no_slower_with_more_memory(make) -> None:
    of = case(make(link=SPILL_FILE))
    step_ms = float("inf")
    for share in (0.45, 0.6, 0.8):
        # with time enough on the busiest machine: `python -m benchmarks.planner_growth` tells how long it takes
        planned = make_plan(of.dataflow, of.share(share), of.evaluator, time_limit_s=200.0)
        assert planned.gap < 0.03
        assert planned.timeline.step_ms <= step_ms
        step_ms = planned.timeline.step_ms


def test_an_interrupt_gives_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object, problem: object) -> None:
        raise KeyboardInterrupt

    of = case(resnet50(link=PCIE_16, speed=50))
    monkeypatch.setattr(pulp.HiGHS, "callSolver", interrupt)
    planned = make_plan(of.dataflow, of.share(0.6), of.evaluator)
    assert planned.timeline.peak_bytes <= of.share(0.6)
    assert planned.notes == ("interrupted: this is the best plan found so far",)


def test_an_interrupt_while_rules_are_tried_gives_the_best_of_them() -> None:
    class Impatient(RealEvaluator):
        """Somebody presses Ctrl-C at the first evaluation after a plan that fits."""

        def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
            if self.found:
                self.found = False
                raise KeyboardInterrupt
            evaluation = super().evaluate(decisions, budget_bytes)
            self.found = evaluation.timeline.peak_bytes <= budget_bytes
            return evaluation

        found = False

    of = case(resnet50(link=PCIE_16, speed=50))
    planned = make_plan(of.dataflow, of.share(0.6), Impatient(of.dataflow))
    assert planned.timeline.peak_bytes <= of.share(0.6)
    assert planned.notes == ("interrupted: this is the best plan found so far",)
    assert planned.status == "heuristic"


def test_without_any_time_left_the_plan_of_a_rule_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a clock that stands where the time limit has passed, whatever the machine does
    leave_no_time(monkeypatch)
    of = case(gpt2(link=PCIE_16, speed=50))
    request = PlanningRequest(of.dataflow, of.share(0.45), of.evaluator)
    # WHEN it is planned
    planned = find_policy("ilp")(request)
    # THEN there is a plan all the same, and a note of what there was no time for
    assert planned.evaluation.timeline.peak_bytes <= of.share(0.45)
    assert not planned.proven
    assert any("time limit" in note for note in planned.notes)
    assert of.evaluator.count < 20, "the simple rules alone"
