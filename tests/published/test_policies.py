"""What each published method does that no other does, on steps small enough to know the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ground.plugins import provided
from pooch.ir import Link, Profile
from pooch.planner import PolicyOutcome, policy_names
from pooch.planner.candidates import Candidates
from pooch.planner.contract import PlanningRequest
from pooch.planner.search.trials import Trials
from pooch.published.policies.capuchin import leaving_order
from pooch.published.policies.chen_sqrt import between_checkpoints
from pooch.published.policies.levels import forward_levels
from pooch.published.policies.pooch_classification import (
    COPIES_IN,
    COPIES_OUT,
    all_swapped,
    keep_from_the_last,
    keeping,
    unhidden_of,
)
from pooch.published.policies.pooch_exhaustive import PoochExhaustive
from pooch.published.policies.tensorflow_loops import LoopSwapping
from pooch.published.policies.tflms import Tflms
from pooch.published.policies.tflms_auto import TflmsAuto
from pooch.published.policies.tflms_tuned import analysis_path
from pooch.schedule import verify
from tests.planner.networks import PCIE_16, resnet50
from tests.planner.support import Case, RealEvaluator, case, make_plan
from tests.toys import FAST_LINK, SLOW_LINK, ToyStep, blocks, chain, ladder, random_profile

LINK = Link("toy tier", 0.0, 0.0, 16.0, 16.0)  # a value of 16 bytes takes 1 ms, as long as a forward op
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)  # an example takes a second
PUBLISHED = sorted(provided("policies"))
PROFILES = Path(__file__).parents[2] / "profiles"


def planned(of: Case, policy: str, share: float) -> PolicyOutcome:
    return make_plan(of.dataflow, of.share(share), of.evaluator, policy=policy)


def smallest(of: Case, policy: str, budget_bytes: int = 1) -> int:
    with pytest.raises(InfeasibleBudget) as raised:
        make_plan(of.dataflow, budget_bytes, of.evaluator, policy=policy)
    assert raised.value.policy == policy
    return raised.value.minimum_bytes


def places(of: Case, plan: PolicyOutcome, choice: str) -> list[int]:
    """Which activations, counted in forward order, are treated so."""
    ids = [value.id for value in of.dataflow.activations]
    return [place for place, value in enumerate(ids) if plan.decisions[value] == choice]


def convolutions(profile: Profile, every: int) -> Profile:
    """Every so many-th op of a toy is called a convolution."""
    ops = tuple(
        replace(op, name="aten.convolution.default") if op.phase == "forward" and op.index % every == 0 else op
        for op in profile.ops
    )
    return replace(profile, ops=ops)


def with_rank(profile: Profile, rank: int) -> Profile:
    return replace(profile, values=tuple(replace(value, shape=(1,) * rank) for value in profile.values))


def long_chain(link: Link = LINK, layers: int = 10) -> Case:
    return case(with_rank(chain(layers, size_bytes=16, link=link), 4))


@pytest.mark.parametrize("policy", sorted({*policy_names()} - {"ilp", "keep_all", "recompute_all", "swap_all"}))
def test_a_minimum_is_a_budget_at_which_the_method_succeeds(policy: str) -> None:
    of = long_chain()
    minimum_bytes = smallest(of, policy)
    plan = make_plan(of.dataflow, minimum_bytes, of.evaluator, policy=policy)
    assert plan.timeline.peak_bytes <= minimum_bytes <= of.profile.peak_bytes


def test_vdnn_takes_no_room_in_the_tier_for_what_it_does_not_copy() -> None:
    """It leaves out a value that its lowering swaps in the forward pass alone."""
    of = case(ladder(8))
    plan = planned(of, "vdnn", 0.7)
    assert len(plan.schedule.swapped) == 13
    assert plan.schedule.host_bytes == 13 * 4096
    verify(of.dataflow, plan.schedule, plan.decisions, of.share(0.7))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=WITHOUT_SHRINKING)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.4, 1.0))
@example(seed=443, share=0.58)  # holds a swappable value to the end of the step
def test_no_method_ever_makes_a_schedule_that_would_fault(seed: int, share: float) -> None:
    of = case(random_profile(Random(seed), 12))
    budget_bytes = max(1, of.share(share))
    for policy in PUBLISHED:
        most_bytes = budget_bytes
        try:
            plan = make_plan(of.dataflow, budget_bytes, of.evaluator, policy=policy)
        except InfeasibleBudget as error:
            most_bytes = error.minimum_bytes
            plan = make_plan(of.dataflow, most_bytes, of.evaluator, policy=policy)
        verify(of.dataflow, plan.schedule, plan.decisions, most_bytes)
        assert of.evaluator.play(plan.schedule).step_ms == pytest.approx(plan.timeline.step_ms)


@pytest.mark.parametrize(
    "profile",
    [chain(9, link=LINK, size_bytes=16), ladder(4, link=SLOW_LINK), blocks(3, link=FAST_LINK), blocks(3)],
    ids=["chain", "ladder", "blocks on a fast link", "blocks on a disk"],
)
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_the_integer_program_is_never_slower_than_any_method(profile: Profile, share: float) -> None:
    of = case(profile)
    times_ms = {}
    for policy in sorted(policy_names()):
        try:
            times_ms[policy] = planned(of, policy, share).timeline.step_ms
        except InfeasibleBudget:
            continue
    assert "ilp" in times_ms or not times_ms
    assert min(times_ms.values(), default=0.0) >= times_ms.get("ilp", 0.0) - 1e-6


def test_swap_all_swaps_also_what_has_room_to_stay() -> None:
    of = long_chain()
    plan = planned(of, "swap_all", 1.0)
    assert places(of, plan, "swap") == list(range(8)), "the last two are read at once when the backward pass begins"
    assert planned(of, "swap_opt", 1.0).schedule.actions == ()


def test_without_scheduling_each_copy_starts_one_anchor_ahead_and_waits_longer() -> None:
    # GIVEN copies in that take as long as two backward ops, and a value that is needed late
    step = ToyStep()
    current = step.external(16)
    for size_bytes in (64, 4, 4, 4, 4, 4):
        (current,) = step.op([current], [size_bytes], saves=[current])
    of = case(step.build(Link("toy tier", 0.0, 0.0, 16.0, 8.0)))
    hoisted, late = planned(of, "swap_all", 1.0), planned(of, "swap_all_no_scheduling", 1.0)
    anchors = of.dataflow.anchor_slots
    needs = {a.target: a.slot for a in late.schedule.actions if a.kind == "wait"}
    starts = {a.target: a.slot for a in late.schedule.actions if a.kind == "copy_in"}
    assert starts
    assert all(anchors.index(needs[value]) - anchors.index(slot) <= 1 for value, slot in starts.items())
    assert late.timeline.stall_ms > hoisted.timeline.stall_ms


def test_swap_opt_keeps_the_tail_and_swaps_the_head() -> None:
    of = long_chain()
    plan = planned(of, "swap_opt", 0.6)
    swapped = places(of, plan, "swap")
    assert swapped == list(range(len(swapped)))
    assert not places(of, plan, "recompute")


def test_pooch_recomputes_what_the_link_is_too_slow_for_and_nothing_on_a_fast_one() -> None:
    slow, fast = long_chain(Link("toy tier", 0.0, 0.0, 2.0, 2.0)), long_chain(Link("toy tier", 0.0, 0.0, 160.0, 160.0))
    replayed = planned(slow, "pooch_2018", 0.6)
    assert places(slow, replayed, "recompute")
    assert replayed.timeline.step_ms < planned(slow, "swap_opt", 0.6).timeline.step_ms
    assert not places(fast, planned(fast, "pooch_2018", 0.6), "recompute")


def swaps_only(sizes: Sequence[int], link: Link) -> Case:
    """A chain of values of these sizes, none of which can be replayed."""
    step = ToyStep()
    current = step.external(8)
    for size_bytes in sizes:
        (current,) = step.op([current], [size_bytes], saves=[current], refusal="a toy that cannot be replayed")
    return case(step.build(link))


SLOW_IN, SLOW_OUT = Link("toy tier", 0.0, 0.0, 100.0, 4.0), Link("toy tier", 0.0, 0.0, 4.0, 100.0)
UNEQUAL = (40, 40, 16, 24, 24, 8, 40, 8)


def fastest_of_all(of: Case, share: float) -> float:
    ids = [value.id for value in of.dataflow.activations]
    times_ms = []
    for leaving in product(("keep", "swap"), repeat=len(ids)):
        timeline = of.evaluator.evaluate(dict(zip(ids, leaving, strict=True)), of.share(share)).timeline  # type: ignore[arg-type]
        if timeline.peak_bytes <= of.share(share):
            times_ms.append(timeline.step_ms)
    return min(times_ms)


@pytest.mark.parametrize("share", [0.75, 0.6])
def test_the_exhaustive_search_finds_the_best_maps_to_keep_where_the_greedy_walk_does_not(share: float) -> None:
    of = swaps_only(UNEQUAL, SLOW_IN)
    searched, greedy = planned(of, "pooch_exhaustive", share), planned(of, "pooch_2018", share)
    assert searched.timeline.step_ms == pytest.approx(fastest_of_all(of, share))
    assert searched.timeline.step_ms < greedy.timeline.step_ms - 1


@pytest.mark.parametrize("link", [SLOW_IN, SLOW_OUT], ids=["slow in", "slow out"])
def test_the_exhaustive_search_is_never_slower_than_the_greedy_walk_before_anything_is_recomputed(link: Link) -> None:
    rng = Random(0)
    for _ in range(6):
        of = swaps_only([rng.choice((8, 16, 24, 40)) for _ in range(8)], link)
        for share in (0.9, 0.75, 0.6):
            searched, greedy = planned(of, "pooch_exhaustive", share), planned(of, "pooch_2018", share)
            assert searched.timeline.step_ms <= greedy.timeline.step_ms + 1e-9


def test_the_exhaustive_search_stops_at_a_block_whose_copies_in_are_hidden_and_at_its_limit() -> None:
    hidden, slow = swaps_only(UNEQUAL, Link("toy tier", 0.0, 0.0, 400.0, 400.0)), swaps_only(UNEQUAL, SLOW_IN)

    def simulations(of: Case, policy: PoochExhaustive) -> int:
        of.evaluator.count = 0
        policy(PlanningRequest(of.dataflow, of.share(0.6), of.evaluator))
        return of.evaluator.count

    greedy = simulations(hidden, PoochExhaustive(most=0))
    assert simulations(hidden, PoochExhaustive()) == greedy, "everything is hidden: there is nothing to search"
    assert simulations(slow, PoochExhaustive()) > 2 * simulations(slow, PoochExhaustive(most=0))


def search_simulations(request: PlanningRequest, evaluator: RealEvaluator, **parameters: int) -> int:
    """How often the exhaustive search simulates."""
    evaluator.count = 0
    PoochExhaustive(**parameters)(request)
    return evaluator.count


def test_the_exhaustive_search_goes_no_further_than_a_block_that_leaves_and_is_hidden() -> None:
    # GIVEN four maps that leave, the tail having room, and unhidden copies in of the first two
    of = swaps_only((16, 40, 4, 24, 40, 16, 4, 4, 40), SLOW_IN)
    request = PlanningRequest(of.dataflow, of.share(0.6), of.evaluator)
    trials = Trials(request)
    ids, start = [value.id for value in of.dataflow.activations], all_swapped(trials, "")
    assert sorted(start.trial.evaluation.schedule.swapped) == ids[:4]
    assert unhidden_of(trials, start, COPIES_IN) == set(ids[:2])

    # THEN blocks of two are not searched, as the second one is hidden; a single block of all is
    counts = [search_simulations(request, of.evaluator, block=block) for block in (2, len(ids))]
    assert counts[0] == search_simulations(request, of.evaluator, most=0) < counts[1]


def test_the_exhaustive_search_passes_over_blocks_for_which_there_is_room() -> None:
    of = swaps_only(UNEQUAL, SLOW_IN)
    request = PlanningRequest(of.dataflow, of.share(0.75), of.evaluator)
    searched = search_simulations(request, of.evaluator, block=2)
    assert searched > search_simulations(request, of.evaluator, most=0)


def test_a_walk_goes_on_past_what_does_not_fit_unless_it_stops_there() -> None:
    of = swaps_only((8, 24, 8, 40, 8, 8), SLOW_OUT)
    trials = Trials(PlanningRequest(of.dataflow, of.share(0.7), of.evaluator))
    start, ids = all_swapped(trials, ""), [value.id for value in of.dataflow.activations]
    small, large = ids[0], ids[1]
    assert keeping(trials, start, large) is None
    assert keep_from_the_last(trials, start, (small, large)).swaps == start.swaps - {small}
    assert keep_from_the_last(trials, start, (small, large), stop_at_first=True) == start


def test_swap_opt_looks_at_copies_out_alone() -> None:
    # GIVEN unhidden copies in of maps at the head, and none out
    of = swaps_only(UNEQUAL, SLOW_IN)
    trials = Trials(PlanningRequest(of.dataflow, of.share(0.75), of.evaluator))
    start = all_swapped(trials, "swap_opt")
    assert unhidden_of(trials, start, COPIES_IN)
    assert not unhidden_of(trials, start, COPIES_OUT)
    # THEN only the walk over all maps keeps anything, from the tail on
    assert planned(of, "swap_opt", 0.75).decisions == keep_from_the_last(trials, start, start.swaps).trial.decisions


def test_a_map_stays_swapped_until_it_is_kept_although_there_is_room_for_it_at_first() -> None:
    of = swaps_only(UNEQUAL, SLOW_IN)
    trials = Trials(PlanningRequest(of.dataflow, of.share(0.75), of.evaluator))
    start = all_swapped(trials, "swap_opt")
    left = [value for value, choice in start.trial.decisions.items() if choice == "swap"]
    assert len(left) < len(start.swaps), "some have room"
    kept = keeping(trials, start, left[-1])
    assert kept is not None, "others leave in its place"


def test_superneurons_swaps_convolutions_and_recomputes_the_rest_of_the_head() -> None:
    of = case(convolutions(chain(12, size_bytes=16, link=LINK), every=3))
    plan = planned(of, "superneurons", 0.7)
    left = places(of, plan, "swap") + places(of, plan, "recompute")
    assert sorted(left) == list(range(len(left))), "the tail is kept"
    assert places(of, plan, "swap")
    assert all(place % 3 == 0 for place in places(of, plan, "swap"))
    assert places(of, plan, "recompute")
    assert all(place % 3 for place in places(of, plan, "recompute"))


def replaying_everything_fits(of: Case, share: float) -> bool:
    """Whether the plan that recomputes all it can, and swaps the rest, keeps the budget."""
    decisions = {item.value: item.choices[-1] for item in Candidates(of.dataflow).items}
    return of.evaluator.evaluate(decisions, of.share(share)).timeline.peak_bytes <= of.share(share)


@pytest.mark.parametrize(
    ("policy", "recorded", "share"),
    [("superneurons", "lstm-b32", 0.8), ("superneurons", "unet3d-b2", 0.5), ("capuchin", "unet3d-b2", 0.65)],
)
def test_a_few_replays_may_fit_although_replaying_everything_would_not(
    policy: str, recorded: str, share: float
) -> None:
    of = case(Profile.load(PROFILES / f"{recorded}-cpu.json"))
    assert not replaying_everything_fits(of, share)
    plan = planned(of, policy, share)
    assert plan.timeline.peak_bytes <= of.share(share)
    assert places(of, plan, "recompute")


def test_superneurons_keeps_as_much_of_the_tail_as_swapping_all_the_rest_permits() -> None:
    of = case(convolutions(chain(12, size_bytes=16, link=LINK), every=3))
    candidates = Candidates(of.dataflow)
    for share in (0.9, 0.7, 0.5):
        left = [
            item.value
            for item in candidates.items
            if planned(of, "superneurons", share).decisions[item.value] != "keep"
        ]
        swapped = dict.fromkeys(left, "swap")
        assert of.evaluator.evaluate(swapped, of.share(share)).timeline.peak_bytes <= of.share(share)
        del swapped[max(left)]
        assert of.evaluator.evaluate(swapped, of.share(share)).timeline.peak_bytes > of.share(share)


def test_vdnn_offloads_inputs_of_convolutions_first_and_of_all_layers_when_it_must() -> None:
    of = case(convolutions(chain(12, size_bytes=16, link=LINK), every=2))
    assert not planned(of, "vdnn", 1.0).schedule.actions
    some, all_of_them = planned(of, "vdnn", 0.8), planned(of, "vdnn", 0.4)
    read_by_convolutions = [place for place in range(12) if place % 2]  # value k is read by op k + 1
    assert set(places(of, some, "swap")) <= set(read_by_convolutions)
    assert len(places(of, all_of_them, "swap")) > len(places(of, some, "swap"))
    first = all_of_them.schedule.swapped[0]
    slots = {a.kind: a.slot for a in all_of_them.schedule.actions if a.target == first}
    anchors = of.dataflow.anchor_slots
    assert anchors.index(slots["wait"]) - anchors.index(slots["copy_in"]) == 1


def test_tflms_counts_tensors_from_the_input_and_triggers_by_distance() -> None:
    of = long_chain()
    request = PlanningRequest(of.dataflow, of.profile.peak_bytes - 16 * 3, of.evaluator)
    fitted, more = Tflms()(request), Tflms(n_tensors=6, lb=2)(request)
    ids = [value.id for value in of.dataflow.activations]
    assert list(fitted.evaluation.schedule.swapped) == ids[: len(fitted.evaluation.schedule.swapped)]
    assert set(more.evaluation.schedule.swapped) <= set(ids[:6])
    assert 0 < max(levels_ahead(of, more).values()) <= 2
    with pytest.raises(InfeasibleBudget):
        Tflms(n_tensors=1)(replace(request, budget_bytes=of.share(0.4)))


def levels_ahead(of: Case, plan: PolicyOutcome) -> dict[int, int]:
    """By place of the value in the chain: anchors from the start of its copy in to its need."""
    anchors, ids = of.dataflow.anchor_slots, [value.id for value in of.dataflow.activations]
    slots = {(a.kind, a.target): a.slot for a in plan.schedule.actions}
    return {
        ids.index(value): anchors.index(slots["wait", value]) - anchors.index(slot)
        for (kind, value), slot in slots.items()
        if kind == "copy_in"
    }


def under(of: Case, parameters: Tflms, share: float = 1.0) -> PolicyOutcome:
    return parameters(PlanningRequest(of.dataflow, of.share(share), of.evaluator))


def test_tflms_swaps_all_tensors_whether_or_not_there_is_room() -> None:
    of = long_chain()
    assert places(of, under(of, Tflms(n_tensors=-1)), "swap") == list(range(8)), "the last two are read at once"
    assert places(of, under(of, Tflms(n_tensors=3)), "swap") == [0, 1, 2]
    assert places(of, under(of, Tflms()), "swap") == []


def test_tflms_starts_copies_where_the_gradient_of_a_deeper_op_runs() -> None:
    # In a chain, both rules find the same op, except where no gradient is in reach.
    of = long_chain()
    for levels in (1, 2, 3):
        chained = levels_ahead(of, under(of, Tflms(n_tensors=-1, lb=levels)))
        direct = levels_ahead(of, under(of, Tflms(n_tensors=-1, lb=levels, trigger="direct_order")))
        assert chained[0] == direct[0] == levels
    none_in_reach = levels_ahead(of, under(of, Tflms(n_tensors=-1, lb=40)))
    assert set(none_in_reach.values()) == {0}


def test_tflms_counts_levels_along_the_longest_path_and_looks_no_further_than_ub() -> None:
    # GIVEN a value with a gradient three levels deeper, the ops between saving nothing
    step = ToyStep()
    first = current = step.external(16)
    for saves in (True, True, False, False, True, True):
        (current,) = step.op([current], [16], saves=[current] if saves else [])
    del first
    of = case(step.build(LINK))
    assert forward_levels(of.dataflow) == [0, 1, 2, 3, 4, 5]
    near, far = (levels_ahead(of, under(of, Tflms(n_tensors=1, lb=1, ub=ub))) for ub in (2, 3))
    assert near == {0: 0}
    assert far[0] > 0


def test_tflms_filters_by_scope_and_type() -> None:
    profile = convolutions(long_chain().profile, every=2)
    ops = tuple(replace(op, module=f"down.{op.index}" if op.index < 4 else f"up.{op.index}") for op in profile.ops)
    of = case(replace(profile, ops=ops))
    assert places(of, under(of, Tflms(n_tensors=-1, include_scopes="down")), "swap") == [0, 1, 2, 3]
    assert places(of, under(of, Tflms(n_tensors=-1, exclude_scopes="down.0, down.2, up")), "swap") == [1, 3]
    assert places(of, under(of, Tflms(n_tensors=-1, include_types="convolution")), "swap") == [0, 2, 4, 6]
    assert places(of, under(of, Tflms(n_tensors=-1, exclude_types="convolution")), "swap") == [1, 3, 5, 7]


def long_skips() -> Case:
    """A long skip: the program holds it while ops with large workspaces run, and reads it again afterwards."""
    step = ToyStep()
    (skip,) = step.op([step.external(16)], [64], saves_outputs=[0])
    (current,) = step.op([skip], [16])
    for _ in range(4):
        (current,) = step.op([current], [16], saves=[current], workspace_bytes=200)
    (current,) = step.op([current, skip], [16], saves=[current, skip])
    for _ in range(2):
        (current,) = step.op([current], [16], saves=[current])
    profile = step.build(FAST_LINK)
    return case(replace(profile, values=tuple(replace(value, touches=()) for value in profile.values)))


def test_tflms_swaps_between_reads_of_the_forward_pass_only_when_told_to() -> None:
    of = long_skips()
    everything = Tflms(n_tensors=-1)
    least = smallest(of, "tflms")
    with pytest.raises(InfeasibleBudget) as raised:
        replace(everything, swap_branches=True)(PlanningRequest(of.dataflow, 1, of.evaluator))
    assert raised.value.minimum_bytes < least
    tight = PlanningRequest(of.dataflow, raised.value.minimum_bytes, of.evaluator)
    branched = replace(everything, swap_branches=True)(tight)
    kinds = {action.kind for action in branched.schedule.actions}
    assert "refill" in kinds
    verify(of.dataflow, branched.schedule, branched.decisions, tight.budget_bytes)
    with pytest.raises(InfeasibleBudget):
        replace(everything, swap_branches=True, branch_threshold=100)(tight)
    plain = everything(replace(tight, budget_bytes=least))
    assert not {action.kind for action in plain.schedule.actions} & {"refill"}


def test_imai_sweeps_branches_and_the_analysis_path() -> None:
    of = long_skips()
    branched = smallest(of, "tflms_tuned")
    assert branched < smallest(of, "tflms")
    # GIVEN extents that shrink on the way down
    shapes = (64, 32, 16, 8, 16, 32, 64, 64)
    ids = [value.id for value in of.dataflow.activations]
    values = list(of.profile.values)
    for value, extent in zip(ids, shapes, strict=False):
        values[value] = replace(values[value], shape=(1, 1, extent))
    narrowing = case(replace(of.profile, values=tuple(values)))
    assert analysis_path(Candidates(narrowing.dataflow)) == shapes.index(8) + 1
    assert analysis_path(Candidates(of.dataflow)) == 0


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"lb": 3, "ub": 2}, r"lb=3 and ub=2: give 0 <= lb <= ub"),
        ({"trigger": "any"}, "no trigger 'any': choose chain_rule or direct_order"),
    ],
)
def test_impossible_parameters_of_tflms_are_refused(parameters: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Tflms(**parameters)


def test_tflms_auto_leaves_a_tenth_free_and_no_vector_moves() -> None:
    of = long_chain()
    plan = planned(of, "tflms_auto", 0.8)
    assert plan.timeline.peak_bytes <= 0.9 * of.share(0.8) + 0.1 * of.profile.persistent_bytes
    tighter = TflmsAuto(memory_ratio=1.0)(PlanningRequest(of.dataflow, of.share(0.8), of.evaluator))
    assert list(tighter.decisions.values()).count("swap") < len(places(of, plan, "swap"))
    vectors = case(with_rank(of.profile, 1))
    assert smallest(vectors, "tflms_auto", of.share(0.8)) > 0.99 * of.profile.peak_bytes


def test_meng_swaps_what_lies_idle_longest() -> None:
    of = long_chain()
    plan = planned(of, "meng_lifetime", 0.7)
    swapped = places(of, plan, "swap")
    assert swapped
    assert swapped == list(range(len(swapped)))


def test_tensorflow_swaps_the_latest_or_the_earliest_once_the_fraction_is_in_use() -> None:
    of = long_chain()
    candidates = Candidates(of.dataflow)
    latest = LoopSwapping("latest", 0.5, least_bytes=0).decisions(candidates, of.profile.peak_bytes)
    earliest = LoopSwapping("earliest", 0.5, least_bytes=0).decisions(candidates, of.profile.peak_bytes)
    ids = [value.id for value in of.dataflow.activations]
    assert min(latest) > ids[2], "nothing leaves before half of the budget is in use"
    assert min(earliest) == ids[0]
    assert not LoopSwapping("latest", 0.5).decisions(candidates, of.profile.peak_bytes), "all are under 2048 bytes"


def test_capuchin_takes_hidden_swaps_by_free_time_and_then_the_cheaper() -> None:
    # GIVEN a link with time for some of the values, that takes ten times a replay for the others
    of = long_chain(Link("toy tier", 0.0, 0.0, 4.0, 4.0))
    order = leaving_order(Candidates(of.dataflow))
    choices = [choice for _, choice in order]
    hidden = choices.index("recompute")
    # THEN the head, which lies idle longest, is swapped, and the rest is recomputed
    ids = [value.id for value in of.dataflow.activations]
    assert [value for value, _ in order[:hidden]] == ids[:hidden]
    assert 0 < hidden < len(ids) - 1
    assert set(choices[hidden:]) == {"recompute"}


def test_chen_keeps_a_checkpoint_per_segment() -> None:
    of = case(chain(16, size_bytes=16, link=LINK))
    decisions = between_checkpoints(Candidates(of.dataflow), 4)
    ids = [value.id for value in of.dataflow.activations]
    kept = [place for place, value in enumerate(ids) if value not in decisions]
    gaps = {later - sooner for sooner, later in pairwise(kept)}
    assert len(kept) in (4, 5)
    assert max(gaps) <= 4
    plan = planned(of, "chen_sqrt", 0.7)
    assert plan.schedule.swapped == ()
    assert plan.timeline.replay_ms > 0


@pytest.mark.parametrize(("policy", "forbidden"), [("ilp_recompute", "swap"), ("ilp_swap", "recompute")])
def test_restricted_programs_use_one_choice_and_claim_no_bound(policy: str, forbidden: str) -> None:
    of = case(resnet50(batch_size=8, link=PCIE_16, speed=50))
    plan = planned(of, policy, 0.7)
    assert not places(of, plan, forbidden)
    assert plan.lower_bound_ms == pytest.approx(sum(of.dataflow.op_times_ms))
    assert any("alone no plan is faster" in note for note in plan.notes)


def test_the_profile_and_region_stay_the_callers() -> None:
    profile = blocks(2)
    before = Dataflow(profile).in_core_points.copy()
    of = case(profile)
    planned(of, "tf_earliest_first", 0.9)
    assert (of.dataflow.in_core_points == before).all()
