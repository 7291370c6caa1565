"""The program is a relaxation: with decisions fixed, its optimum is never above their simulated step.

This is what the lower bound rests on, so it is tested row by row on decisions of every kind, not only on good ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pooch.ir import Choice, Decisions, HookCosts, Profile
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest
from pooch.planner.program.classes import make_classes
from pooch.planner.program.marks import choose_marks
from pooch.planner.program.solver import Limits, Solution, solve
from pooch.planner.program.step_program import StepProgram
from pooch.planner.search.trials import Trials
from tests.planner.networks import PCIE_16, SPILL_FILE, gpt2, resnet50
from tests.planner.support import Case, case
from tests.toys import blocks, profiles, random_decisions, random_profile


def solve_fixed(of: Case, decisions: Decisions, budget_bytes: int, pieces: int, *, merge: bool = False) -> Solution:
    """The program with every choice fixed."""
    candidates = Candidates(of.dataflow)
    built = StepProgram(candidates, choose_marks(candidates, pieces), budget_bytes, merge=merge)
    for variable, value in built.values_of(decisions).items():
        built.problem += variable == value, f"fixed_{variable.name}"
    return solve(built.problem, Limits(gap=0.0, nodes=10, time_s=20.0))


def assert_relaxed(
    of: Case, decisions: dict[int, Choice], lowering_bytes: int, pieces: int, *, merge: bool = False
) -> None:
    """Whatever these decisions take, in time and memory, the program allows it."""
    candidates = Candidates(of.dataflow)
    trial = Trials(PlanningRequest(of.dataflow, lowering_bytes, of.evaluator), candidates).run(decisions)
    peak_bytes, step_ms = trial.evaluation.timeline.peak_bytes, trial.step_ms
    solution = solve_fixed(of, trial.decisions, peak_bytes, pieces, merge=merge)
    assert solution.bound < math.inf, "the simulator showed a plan within this peak"
    assert solution.objective <= step_ms * (1 + 1e-6) + 1e-6


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    profiles(max_ops=10),
    st.sampled_from([HookCosts(), HookCosts(0.0, 0.4, 0.0), HookCosts(0.0, 0.2, 0.7)]),
    st.sampled_from([0.2, 0.6, 0.8, 0.95]),
    st.sampled_from([1, 3, 48]),
    st.randoms(),
)
def test_random_plans_of_random_steps_satisfy_the_program(
    profile: Profile, hooks: HookCosts, share: float, pieces: int, random: Random
) -> None:
    of = case(replace(profile, hooks=hooks))
    assume(len(of.dataflow.activations) >= 2)
    assert_relaxed(of, random_decisions(random, of.dataflow), of.share(share), pieces)


def test_copies_of_a_nanosecond_are_no_less_than_the_solver_s_tolerance() -> None:
    """A byte over a link of a terabyte a second: that it leaves is seen all the same."""
    of = case(random_profile(Random(134), 8))
    decisions: dict[int, Choice] = dict.fromkeys((value.id for value in of.dataflow.activations), "keep")
    assert of.dataflow.profile.values[6].size_bytes == 1
    assert_relaxed(of, decisions | {6: "swap"}, of.share(0.2), pieces=1)


def test_what_nothing_reads_again_frees_the_last_slot_in_which_it_lives() -> None:
    """Such values die one slot after their last use: that slot is all that there is to gain."""
    of = case(random_profile(Random(24985680), 5))
    unread = [item for item in Candidates(of.dataflow).items if item.value in (6, 7)]
    assert [(item.need, item.death - item.release) for item in unread] == [(-1, 1), (-1, 1)]
    assert [item.can_recompute for item in unread] == [True, True]
    decisions: dict[int, Choice] = {3: "recompute", 4: "swap", 6: "keep", 7: "recompute"}
    assert_relaxed(of, decisions, of.share(0.0), pieces=48)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [resnet50, gpt2])
def test_random_plans_of_networks_satisfy_the_program(make: Callable[..., Profile], seed: int) -> None:
    of = case(make(link=[SPILL_FILE, PCIE_16, SPILL_FILE][seed], speed=[1, 50, 20][seed]))
    assert_relaxed(of, random_decisions(Random(seed), of.dataflow), of.share(0.5), pieces=24)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [lambda: blocks(12), lambda: gpt2(layers=8, link=PCIE_16, speed=50)])
def test_plans_of_repeated_blocks_satisfy_the_program_of_classes(make: Callable[..., Profile], seed: int) -> None:
    of = case(make())
    decisions = random_decisions(Random(seed), of.dataflow)
    assert_relaxed(of, decisions, of.share(0.3 + 0.1 * seed), pieces=[1, 3, 6][seed % 3], merge=True)


def test_repeated_blocks_become_classes() -> None:
    # GIVEN twenty equal blocks and four intervals per phase
    of = case(gpt2(layers=20))
    candidates = Candidates(of.dataflow)
    marks = choose_marks(candidates, 4)
    # WHEN their activations are taken together
    alone = make_classes(candidates, marks, candidates.items, merge=False)
    merged = make_classes(candidates, marks, candidates.items, merge=True)
    # THEN far fewer classes stand for all of them, each of one size
    assert len(alone) == len(candidates.items) > 250
    assert len(merged) < len(alone) / 2
    assert sorted(item.value for group in merged for item in group.members) == sorted(of.dataflow.activation_ids)
    assert all(len({item.memory_bytes for item in group.members}) == 1 for group in merged)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(profiles(max_ops=12), st.sampled_from([0.2, 0.6, 0.9]), st.randoms())
def test_no_plan_goes_below_what_decisions_are_said_to_need(profile: Profile, share: float, random: Random) -> None:
    of = case(profile)
    assume(of.dataflow.activations)
    decisions = random_decisions(random, of.dataflow)
    candidates = Candidates(of.dataflow)
    timeline = of.evaluator.evaluate(decisions, of.share(share)).timeline
    assert (candidates.least_points(decisions) <= timeline.point_bytes).all()
    assert candidates.least_ms(decisions) <= timeline.step_ms + 1e-9


def assert_no_other_change_frees(of: Case, decisions: dict[int, Choice]) -> int:
    """Any change of one choice by which fewer bytes are needed at the fullest point is one that is named."""
    candidates = Candidates(of.dataflow)
    complete = {item.value: decisions.get(item.value, "keep") for item in candidates.items}
    least_bytes = candidates.least_points(complete)
    fullest = int(least_bytes.argmax())
    named = {item.value for item in candidates.may_free(complete, fullest)}
    for item in candidates.items:
        for choice in item.choices:
            if candidates.least_points(complete | {item.value: choice})[fullest] < least_bytes[fullest]:
                assert item.value in named
    return len(named)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(profiles(max_ops=12), st.randoms())
def test_changes_that_free_the_fullest_point_are_all_named(profile: Profile, random: Random) -> None:
    of = case(profile)
    assume(of.dataflow.activations)
    assert_no_other_change_frees(of, random_decisions(random, of.dataflow))


def test_a_network_that_swaps_all_has_hardly_any_such_change() -> None:
    of = case(gpt2(layers=4, link=PCIE_16, speed=50))
    candidates = Candidates(of.dataflow)
    assert assert_no_other_change_frees(of, candidates.all_of("swap")) < len(candidates.items) / 4
