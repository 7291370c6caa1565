"""The smallest budget for which a plan is known: the last resort of planning, and what an error names."""

from __future__ import annotations

from itertools import product
from random import Random
from traceback import walk_stack

import pytest

from pooch.ground.errors import InfeasibleBudget
from pooch.ir import Choice
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest
from pooch.planner.search import search as search_module
from pooch.planner.search import trials as trials_module
from pooch.planner.search.leanest import Leanest, _improve, leanest_plan, try_leanest
from pooch.planner.search.trials import Trials
from tests.planner import shapes
from tests.planner.support import case


def of_replays(seed: int, activations: int) -> Trials:
    """A chain in which nothing can be swapped."""
    of = case(shapes.chains(Random(seed), activations))
    return Trials(PlanningRequest(of.dataflow, of.share(0.5), of.evaluator), Candidates(of.dataflow, "recompute"))


@pytest.mark.parametrize("seed", range(60))
def test_a_start_that_needs_less_hides_none_that_leads_further(seed: int) -> None:
    """Checkpoints need less than recomputing everything, until single choices are changed."""
    trials = of_replays(seed, 8)
    everything = trials.candidates.all_of("recompute")
    improved = _improve(trials, Leanest(everything, trials.least_budget(everything)))
    assert leanest_plan(of_replays(seed, 8)).budget_bytes <= improved.budget_bytes


def test_single_changes_follow_one_another_at_one_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM over 128 steps takes hundreds of changes: each within the last one would pass Python's limit."""
    trials, depths = of_replays(0, 40), []
    least_budget = trials.least_budget

    def asked(decisions: dict[int, Choice]) -> int:
        depths.append(sum(1 for _ in walk_stack(None)))
        return least_budget(decisions)

    monkeypatch.setattr(trials, "least_budget", asked)
    keeping = trials.candidates.all_of("keep")
    assert _improve(trials, Leanest(keeping, least_budget(keeping))).decisions != keeping
    assert len(depths) > 3
    assert len(set(depths)) == 1


def test_what_it_finds_is_near_the_least_that_any_plan_needs() -> None:
    found, least = 0, 0
    for seed in range(12):
        trials = of_replays(seed, 8)
        items = trials.candidates.items
        every: list[dict[int, Choice]] = [
            dict(zip((item.value for item in items), choices, strict=True))
            for choices in product(*(item.choices for item in items))
        ]
        least += min(trials.least_budget(decisions) for decisions in every)
        found += leanest_plan(trials).budget_bytes
    assert least <= found <= 1.05 * least


@pytest.mark.parametrize("seed", range(20))
def test_the_search_for_any_plan_that_fits_ends_with_the_first(seed: int) -> None:
    search = of_replays(seed, 8)
    least_bytes = leanest_plan(search).budget_bytes
    asked = search.request.evaluator
    for budget_bytes in (least_bytes, (least_bytes + 3 * search.request.dataflow.profile.peak_bytes) // 4):
        trials = Trials(PlanningRequest(search.request.dataflow, budget_bytes, asked), search.candidates)
        try_leanest(trials)
        assert trials.best is not None
        assert trials.best.evaluation.timeline.peak_bytes <= budget_bytes
        assert trials.count < search.count or budget_bytes == least_bytes
    trials = Trials(PlanningRequest(search.request.dataflow, least_bytes - 1, asked), search.candidates)
    with pytest.raises(InfeasibleBudget) as caught:
        try_leanest(trials)
    assert caught.value.minimum_bytes == least_bytes


@pytest.mark.parametrize("finds", [True, False])
def test_with_many_activations_the_leanest_plan_is_looked_for_where_the_program_finds_none(
    finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand activations that took minutes, whatever the time limit was."""
    of = case(shapes.chains(Random(3), 12))
    looked: list[bool] = []

    def look(trials: Trials) -> None:
        looked.append(True)
        try_leanest(trials)

    monkeypatch.setattr(trials_module, "MANY", 1)
    monkeypatch.setattr(search_module, "try_rules", lambda trials: None)
    monkeypatch.setattr(search_module, "try_starts", lambda trials: False)
    monkeypatch.setattr(search_module, "try_leanest", look)
    if not finds:
        monkeypatch.setattr(search_module.Programs, "solve", lambda programs, number: None)
    request = PlanningRequest(of.dataflow, of.share(0.9), of.evaluator)
    outcome = search_module.search(request)
    assert outcome.evaluation.timeline.peak_bytes <= request.budget_bytes
    assert bool(looked) != finds
