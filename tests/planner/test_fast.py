"""A fast plan is a plan like any other: it fits, passes the verifier, repeats itself, and says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pooch import plan, plan_from_decisions, simulate
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Choice
from pooch.planner.contract import INTERRUPTED, PlanningRequest
from pooch.planner.search.search import search
from pooch.schedule import verify
from tests.planner.networks import PCIE_16, SPILL_FILE, gpt2, resnet50
from tests.planner.shapes import SHAPES
from tests.planner.support import Case, RealEvaluator, case, make_plan, oracle_ms
from tests.toys import blocks

CASES = [
    pytest.param(lambda: resnet50(link=PCIE_16, speed=50, batch_size=8), id="resnet50, GPU-like"),
    pytest.param(lambda: resnet50(link=SPILL_FILE, batch_size=8), id="resnet50, CPU-like"),
    pytest.param(lambda: gpt2(layers=18, link=PCIE_16, speed=50, fine=True), id="gpt2 of 489 activations"),
]


def random_case(shape: str, seed: int) -> Case:
    return case(SHAPES[shape](Random(seed), 7))


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_fast_plan_passes_the_verifier_within_the_budget_and_near_its_bound(make, share: float) -> None:
    of = case(make())
    budget_bytes = of.share(share)
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator, effort="fast")
    verify(of.dataflow, planned.schedule, planned.decisions, budget_bytes)
    assert planned.timeline.peak_bytes <= budget_bytes
    assert planned.lower_bound_ms <= planned.step_ms < 1.1 * planned.lower_bound_ms
    assert planned.rows, "each activation has its reason"


@pytest.mark.parametrize("make", CASES)
def test_fast_plan_takes_few_evaluations(make) -> None:
    of = case(make())
    make_plan(of.dataflow, of.share(0.45), of.evaluator, effort="fast")
    assert of.evaluator.count <= 60 + 2 * 60_000 // of.dataflow.end, "what their ops add up to is bounded"


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("seed", range(6))
def test_fast_plans_of_random_steps_fit_and_respect_the_oracle(shape: str, seed: int) -> None:
    of = random_case(shape, seed)
    for share in (0.9, 0.7, 0.5):
        budget_bytes = of.share(share)
        oracle = oracle_ms(of, budget_bytes)
        if oracle is None:
            with pytest.raises(InfeasibleBudget) as raised:
                make_plan(of.dataflow, budget_bytes, of.evaluator, effort="fast")
            budget_bytes = raised.value.minimum_bytes
            oracle = oracle_ms(of, budget_bytes)
        planned = make_plan(of.dataflow, budget_bytes, of.evaluator, effort="fast")
        verify(of.dataflow, planned.schedule, planned.decisions, budget_bytes)
        assert planned.timeline.peak_bytes <= budget_bytes
        assert oracle is not None
        assert planned.lower_bound_ms - 1e-6 <= oracle <= planned.step_ms + 1e-6


@pytest.mark.parametrize("host_share", [0.1, 0.4])
def test_fast_plan_keeps_the_host_budget(host_share: float) -> None:
    of = case(resnet50(link=PCIE_16, speed=50, batch_size=8))
    host_bytes = int(host_share * of.profile.peak_bytes)
    planned = make_plan(of.dataflow, of.share(0.6), of.evaluator, effort="fast", host_budget_bytes=host_bytes)
    assert planned.schedule.host_bytes <= host_bytes
    assert planned.timeline.peak_bytes <= of.share(0.6)


def test_fast_and_full_name_the_same_smallest_budget_and_plan_in_it() -> None:
    profile = blocks(4)
    minima = []
    for effort in ("full", "fast"):
        with pytest.raises(InfeasibleBudget) as raised:
            plan(profile, "1%", region="step", effort=effort)
        minima.append(raised.value.minimum_bytes)
    assert minima[0] == minima[1]
    assert plan(profile, minima[0], region="step", effort="fast").predicted_peak_bytes <= minima[0]


def test_same_request_gives_the_same_fast_plan() -> None:
    of = case(resnet50(link=PCIE_16, speed=50, batch_size=8))
    first, second = (make_plan(of.dataflow, of.share(0.5), of.evaluator, effort="fast") for _ in range(2))
    assert (first.decisions, first.schedule) == (second.decisions, second.schedule)


def test_full_search_refines_a_fast_plan() -> None:
    # GIVEN a fast plan
    profile = resnet50(link=SPILL_FILE, batch_size=4)
    fast = plan(profile, "70%", region="step", effort="fast")
    # WHEN the ordinary search knows it
    full = plan(profile, "70%", region="step", known=[fast], explain=False)
    # THEN its plan is not slower, and the fast one says what it is
    assert full.predicted_step_ms <= fast.predicted_step_ms
    assert any("little effort" in note for note in fast.notes)
    assert not any("little effort" in note for note in full.notes)


@pytest.mark.parametrize("effort", ["full", "fast"])
def test_plan_is_not_slower_than_a_start_that_fits(effort) -> None:
    # GIVEN decisions that a longer search found for a step
    of = case(resnet50(link=PCIE_16, speed=50, batch_size=8))
    good = make_plan(of.dataflow, of.share(0.6), of.evaluator, explain=False)

    # WHEN a search that finds nothing by itself starts from them
    class Slowed(RealEvaluator):
        """Everything but the start is over the budget."""

        def evaluate(self, decisions, budget_bytes):
            found = super().evaluate(decisions, budget_bytes)
            if dict(decisions) == good.decisions:
                return found
            return replace(found, timeline=replace(found.timeline, peak_bytes=of.profile.peak_bytes))

    planned = make_plan(
        of.dataflow, of.share(0.6), Slowed(of.dataflow), effort=effort, start=good.decisions, explain=False
    )
    # THEN they are the plan
    assert planned.decisions == good.decisions
    assert planned.step_ms == pytest.approx(good.step_ms)


def test_start_that_does_not_fit_is_repaired_before_anything_else_is_tried() -> None:
    # GIVEN decisions for a larger budget, written down: which ones a search finds depends on the version of HiGHS
    of = case(resnet50(link=PCIE_16, speed=50, batch_size=8))
    leaving = dict.fromkeys((5, 26, 78, 83, 110, 112, 115), "swap")
    leaving |= dict.fromkeys((8, 13, 18, 22, 38, 54), "recompute")
    assert of.share(0.6) < of.evaluator.evaluate(leaving, of.share(0.8)).timeline.peak_bytes <= of.share(0.8)
    # WHEN a search under a smaller one starts from them, and is stopped as soon as it does anything else
    asked = []

    def stop(text: str, share: float) -> None:
        asked.append(text)
        if len(asked) == 1:
            raise KeyboardInterrupt

    request = PlanningRequest(of.dataflow, of.share(0.6), of.evaluator, effort="fast", start=leaving, progress=stop)
    try:
        planned = search(request)
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("there was no plan yet")
    # THEN it has a plan that fits, in which those leave as the start has it, unless the lowering need not let them
    assert INTERRUPTED in planned.notes
    assert planned.timeline.peak_bytes <= of.share(0.6)
    left = {value: choice for value, choice in planned.decisions.items() if choice != "keep"}
    assert len(left.keys() & leaving.keys()) > len(leaving) / 2
    assert all(left[value] == choice for value, choice in leaving.items() if value in left)
    assert len(left) > len(leaving)


def test_start_may_name_choices_that_are_impossible_here() -> None:
    # GIVEN a value that cannot be recomputed, and a start that wants just that
    of = random_case("chains", 3)
    refused = {v.id: "recompute" for v in of.dataflow.activations if of.dataflow.refusal(v.id) is not None}
    every: dict[int, Choice] = {value.id: "recompute" for value in of.dataflow.activations}
    assert refused, "the step has such a value"
    # THEN planning goes on without it
    planned = make_plan(of.dataflow, of.share(0.8), of.evaluator, effort="fast", start=every)
    assert all(planned.decisions[value] != "recompute" for value in refused)


def test_what_cannot_be_asked_is_refused_in_one_line() -> None:
    profile = blocks(3)
    known = plan_from_decisions(profile, {}, region="step")
    assert simulate(profile, known).peak_bytes == profile.peak_bytes
    with pytest.raises(UsageError, match="there is no effort 'quick': choose full or fast"):
        plan(profile, "80%", region="step", effort="quick")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="policy 'keep_all' has no effort"):
        plan(profile, "80%", region="step", effort="fast", policy="keep_all")
    with pytest.raises(UsageError, match="policy 'swap_all' has no start"):
        plan(profile, "80%", region="step", start={}, policy="swap_all")
    with pytest.raises(UsageError, match="value 9999, which is not an activation"):
        plan(profile, "80%", region="step", start={9999: "swap"})
