"""The blocks of a step: at every point, they sum up to what the simulator says is live."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.remainder import remainders, storages
from pooch.ir import Action, Profile, Region, Schedule
from pooch.packing import bound_of, pack, verify
from pooch.schedule import lower
from pooch.simulator import BlockMaker, StepBlocks, simulate
from tests import toys

NOTHING = Schedule((), (), (), (), (), 0)
moderate = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def live_points(found: StepBlocks) -> list[int]:
    """The highest sum of live blocks at each point, and what is outside of them."""
    change = numpy.zeros(found.point_ticks[-1][1] + 1, dtype=numpy.int64)
    for item in found.items:
        change[item.block.lower] += item.block.size_bytes
        change[item.block.upper] -= item.block.size_bytes
    live = numpy.cumsum(change)[:-1] + found.outside_bytes
    return [int(live[first:end].max()) for first, end in found.point_ticks]


def kinds_at(found: StepBlocks, kind: str) -> list[tuple[int, int]]:
    """(size, target) of the blocks of a kind."""
    return [(item.block.size_bytes, item.target) for item in found.items if item.kind == kind]


@moderate
@given(toys.profiles(), st.sampled_from(["step", "step", "model"]), st.integers(0, 2**32 - 1))
def test_blocks_sum_up_to_the_simulated_bytes_at_every_point(profile: Profile, region: Region, seed: int) -> None:
    random = Random(seed)
    dataflow = Dataflow(profile, region)
    decided = toys.random_decisions(random, dataflow)
    least = simulate(dataflow, lower(dataflow, decided, 1)).peak_bytes
    schedule = lower(dataflow, decided, random.randint(least - 10, max(least, profile.peak_bytes) + 10))
    found = BlockMaker(dataflow).blocks(schedule)
    timeline = simulate(dataflow, schedule)
    assert live_points(found) == timeline.point_bytes.tolist()
    assert bound_of(found.blocks) + found.outside_bytes == timeline.peak_bytes
    for kind in sorted({item.kind for item in found.items}):
        event(kind)


@moderate
@given(toys.profiles(), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_budgets_by_point_are_kept_where_one_budget_is(profile: Profile, seed: int, pieces: int) -> None:
    """A budget for each point is no other rule: with the same number at each, the schedule is the same."""
    random = Random(seed)
    dataflow = Dataflow(profile)
    decided = toys.random_decisions(random, dataflow)
    least = simulate(dataflow, lower(dataflow, decided, 1)).peak_bytes
    budget = random.randint(least, max(least, profile.peak_bytes))
    everywhere = numpy.full(2 * dataflow.end, budget)
    assert lower(dataflow, decided, everywhere) == lower(dataflow, decided, budget)
    roomy = everywhere + numpy.repeat([random.choice([0, 10, 10**6]) for _ in range(2 * dataflow.end)], 1)
    points = simulate(dataflow, lower(dataflow, decided, roomy)).point_bytes
    assert (points <= numpy.maximum(roomy, least)).all()


@moderate
@given(toys.profiles())
def test_every_layout_of_a_step_holds(profile: Profile) -> None:
    found = BlockMaker(Dataflow(profile)).blocks(NOTHING)
    verify(found.blocks, pack(found.blocks, max_rounds=1, time_limit_s=1e6))


def test_a_swapped_value_has_two_lives_and_a_kept_one_has_one() -> None:
    dataflow = Dataflow(toys.chain(5, size_bytes=10))
    found = BlockMaker(dataflow).blocks(lower(dataflow, {1: "swap"}, 1))
    assert len(kinds_at(found, "swap")) == 2
    lives = sorted((item.block.lower, item.block.upper) for item in found.items if item.target == 1)
    assert lives[0][1] < lives[1][0]
    assert {target for _, target in kinds_at(found, "keep")}.isdisjoint({1})


def test_a_replay_has_blocks_of_its_own() -> None:
    profile = toys.chain(3, size_bytes=10, unsaved_between=1, workspace_bytes=7)
    dataflow = Dataflow(profile)
    found = BlockMaker(dataflow).blocks(lower(dataflow, {2: "recompute"}, 1))
    assert len(kinds_at(found, "recompute")) == 2
    assert kinds_at(found, "replay") == [(10, 1)]
    assert kinds_at(found, "temporary").count((7, 1)) == 2  # once in the forward pass, once in its replay


def test_a_replay_in_place_takes_over_the_storage() -> None:
    step = toys.ToyStep()
    first, between, changed = step.op([step.external(4)], [20], saves_outputs=[0])[0], 0, 0
    between = step.op([first], [20])[0]
    changed = step.op([between], overwrites=between, saves_outputs=[0])[0]
    step.op([changed], [1], saves_outputs=[0])
    dataflow = Dataflow(step.build())
    schedule = lower(dataflow, {changed: "recompute"}, 1)
    assert any(action.in_place for action in schedule.actions)
    found = BlockMaker(dataflow).blocks(schedule)
    assert len(kinds_at(found, "recompute")) == 2
    assert kinds_at(found, "replay") == []  # what the op before it made is the same block


def test_a_backward_op_replaces_a_gradient_by_another_and_needs_no_workspace() -> None:
    step = toys.ToyStep()
    value = step.external(4)
    for gradient_bytes in (16, 16, 0):
        value = step.op([value], [16], saves_outputs=[0], gradient_bytes=gradient_bytes)[0]
    profile = step.build()
    slot = profile.forward_ops + 1  # beside the gradient that it reads, the op has the one that it makes
    ops = [replace(op, peak_bytes=op.peak_bytes + 16 * (op.index == slot)) for op in profile.ops]
    profile = replace(profile, ops=tuple(ops), peak_bytes=max(op.peak_bytes for op in ops))
    dataflow = Dataflow(profile)
    found, outside_bytes = remainders(dataflow, storages(dataflow))
    assert outside_bytes == 4
    assert [(rest.kind, rest.size_bytes) for rest in found] == [("gradient", 16)] * 2
    assert found[0].end_point == found[1].first_point + 1 == 2 * slot + 2


def test_what_an_op_computes_in_place_is_not_counted_twice_though_its_profile_has_a_new_value() -> None:
    """As a linear layer adds its bias, unless a dispatch mode is watching."""
    step = toys.ToyStep()
    first = step.op([step.external(100)], [20], saves_outputs=[0])[0]
    product = step.op([first], [16])[0]
    total = step.op([product], [16])[0]
    step.op([total], [20], saves_outputs=[0])
    profile = step.build()
    adding = profile.values[total].producer
    ops = [replace(op, peak_bytes=op.peak_bytes - 16 * (op.index == adding)) for op in profile.ops]
    dataflow = Dataflow(replace(profile, ops=tuple(ops)))
    assert remainders(dataflow, storages(dataflow)) == ((), 100)
    found = BlockMaker(dataflow).blocks(NOTHING)
    lives = {item.target: (item.block.lower, item.block.upper) for item in found.items}
    assert lives[product][1] == lives[total][0]
    assert live_points(found) == dataflow.in_core_points.tolist()


@pytest.mark.parametrize("sizes", ["requested", "allocated"])
def test_offsets_are_aligned_as_the_allocator_does(sizes: str) -> None:
    profile = replace(toys.chain(3, size_bytes=10), sizes=sizes)
    found = BlockMaker(Dataflow(profile)).blocks(NOTHING)
    assert {block.alignment_bytes for block in found.blocks} == {64 if sizes == "requested" else 512}


def test_a_free_behind_other_actions_ends_its_block_there() -> None:
    dataflow = Dataflow(toys.chain(4, size_bytes=10))
    actions = (
        Action(1, "copy_out", 1), Action(4, "copy_out", 2), Action(4, "wait", 1), Action(4, "free", 1),
        Action(6, "copy_in", 1), Action(6, "wait", 1),
    )  # fmt: skip
    schedule = Schedule(actions, (), (), (1,), ((1, 0),), 4096)
    found = BlockMaker(dataflow).blocks(schedule)
    assert live_points(found) == simulate(dataflow, schedule).point_bytes.tolist()
