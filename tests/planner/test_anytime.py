"""Whatever happens while planning, there is a plan: time runs out, Ctrl-C is pressed, solvers are missing or crash."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pulp
import pytest

from pooch.errors import InfeasibleBudget
from pooch.ir import Choice, Decisions, Schedule, Timeline
from pooch.planner import Evaluation, PlanningRequest, contract, find_policy, policy_names
from pooch.planner.candidates import Leaving
from pooch.planner.contract import INTERRUPTED
from pooch.planner.search import search as algorithm
from pooch.planner.search import time_limit
from pooch.planner.search.search import search
from tests.planner.networks import PCIE_16, gpt2, resnet50
from tests.planner.support import Case, RealEvaluator, case, make_plan


class Clock:
    """A clock that only evaluations move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class SlowEvaluator(RealEvaluator):
    """Each evaluation takes so long."""

    def __init__(self, of: Case, clock: Clock, seconds: float) -> None:
        super().__init__(of.dataflow)
        self.clock, self.seconds = clock, seconds

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        self.clock.now_s += self.seconds
        return super().evaluate(decisions, budget_bytes)

    def play(self, schedule: Schedule) -> Timeline:
        self.clock.now_s += self.seconds
        return super().play(schedule)

    def time_ms(self, schedule: Schedule) -> float:
        self.clock.now_s += self.seconds
        return super().time_ms(schedule)


@pytest.mark.parametrize("limit_s", [1.0, 4.0])
@pytest.mark.parametrize("share", [0.6, 0.45])
def test_planning_ends_within_a_fifth_of_its_time_limit(
    limit_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN evaluations so slow that everything together would take minutes, on a clock that nothing else moves
    of, clock = case(resnet50(link=PCIE_16, speed=50, batch_size=8)), Clock()
    for module in (contract, time_limit):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    evaluator = SlowEvaluator(of, clock, 0.02)
    request = PlanningRequest(of.dataflow, of.share(share), evaluator, time_limit_s=limit_s, started_s=clock.now_s)
    # WHEN it is planned
    outcome = search(request)
    # THEN that took no longer than allowed, and the plan fits
    assert 0.5 * limit_s < clock.now_s - 1000.0 <= 1.2 * limit_s
    assert outcome.evaluation.timeline.peak_bytes <= of.share(share)


def cheap_ms(of: Case, budget_bytes: int) -> float:
    """The best of the quick methods."""
    found = []
    for policy in ("swap_all", "recompute_all", "superneurons", "capuchin", "meng_lifetime", "tflms"):
        try:
            found.append(make_plan(of.dataflow, budget_bytes, of.evaluator, policy=policy).timeline.step_ms)
        except InfeasibleBudget:
            continue
    return min(found)


@pytest.mark.parametrize("missing", ["highs", "crash"])
def test_without_a_solver_the_plan_is_at_least_as_good_as_the_cheap_methods(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = case(gpt2(layers=3, link=PCIE_16, speed=50))
    budget_bytes = of.share(0.8)

    def crash(self: object, problem: object) -> None:
        raise RuntimeError("the basis is singular")

    if missing == "highs":
        monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    else:
        monkeypatch.setattr(pulp.HiGHS, "callSolver", crash)
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    told = {"highs": "pip install highspy", "crash": "the solver failed: RuntimeError: the basis is singular"}[missing]
    assert planned.status == "heuristic"
    assert sum(told in note for note in planned.notes) == 1
    assert planned.timeline.peak_bytes <= budget_bytes
    assert planned.timeline.step_ms <= cheap_ms(of, budget_bytes) + 1e-6


@pytest.mark.parametrize("only", ["swap", None], ids=["restricted", "smaller"])
def test_an_interrupt_after_the_program_gives_its_plan(only: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a plan that is not proven to be the best, so that restricted programs and smaller budgets are looked at
    of = case(gpt2(layers=3, link=PCIE_16, speed=50))
    bound_ms = algorithm._bound_ms

    def interrupt(request: PlanningRequest, of_program: Leaving | None) -> float:
        if of_program == only:
            raise KeyboardInterrupt
        return bound_ms(request, of_program)

    # WHEN Ctrl-C is pressed there
    monkeypatch.setattr(algorithm, "_bound_ms", interrupt)
    planned = make_plan(of.dataflow, of.share(0.8), of.evaluator)
    # THEN the plan so far is the answer, with its bound
    assert planned.notes == (INTERRUPTED,)
    assert planned.timeline.peak_bytes <= of.share(0.8)
    assert planned.status in ("optimal", "feasible")


def test_an_interrupt_within_a_part_of_the_search_ends_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN Ctrl-C while the plan for a smaller budget is being made
    of = case(gpt2(layers=3, link=PCIE_16, speed=50))
    budget_bytes, real = of.share(0.8), algorithm.Programs.solve

    def interrupt(self: algorithm.Programs, number: int) -> dict[int, Choice] | None:
        if self.request.budget_bytes < budget_bytes:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(algorithm, "_bound_ms", lambda request, only: 0.0)
    monkeypatch.setattr(algorithm.Programs, "solve", interrupt)
    planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    assert planned.notes == (INTERRUPTED,)
    assert planned.interrupted
    assert planned.timeline.peak_bytes <= budget_bytes


def test_without_time_for_restricted_programs_and_smaller_budgets_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a clock that jumps past the time limit as soon as the bound is known
    of, clock = case(gpt2(layers=3, link=PCIE_16, speed=50)), Clock()
    for module in (contract, time_limit):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    real = algorithm.Programs.solve

    def late(self: algorithm.Programs, number: int) -> dict[int, Choice] | None:
        decisions = real(self, number)
        clock.now_s = 1e12
        return decisions

    monkeypatch.setattr(algorithm.Programs, "solve", late)
    outcome = search(PlanningRequest(of.dataflow, of.share(0.8), of.evaluator, started_s=clock.now_s))
    assert outcome.notes == (algorithm.NO_TIME_FOR_RESTRICTED, algorithm.NO_TIME_FOR_SMALLER)


def test_every_policy_is_one_that_can_be_cut_short() -> None:
    # offered to the program, a method ends where its time does: at its next evaluation
    of = case(resnet50(batch_size=8))
    request = PlanningRequest(of.dataflow, of.share(0.6), of.evaluator)
    timed = replace(request, evaluator=time_limit.Timed(of.evaluator, 0.0))
    for name, policy in ((name, find_policy(name)) for name in policy_names()):
        if not name.startswith("ilp"):
            with pytest.raises(time_limit.OutOfTime):
                policy(timed)
