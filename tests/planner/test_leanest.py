"""The smallest budget for which a plan is known: the last resort of planning, and what an error names."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from pooch.ir import Choice
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest
from pooch.planner.search.leanest import Leanest, _improve, leanest_plan
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
