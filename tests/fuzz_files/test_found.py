"""What the fuzzers have found, each in the words of the file that showed it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import pooch
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.api.step_lives import lives_of
from pooch.errors import PlanMismatch, PoochError, UsageError
from pooch.ir import Plan
from pooch.ir.profile import InFlight
from tests.toys import blocks, random_profile, sharded

pytestmark = pytest.mark.cpu


def test_a_plan_for_more_microbatches_than_any_memory_holds_is_told() -> None:
    profile = blocks(3)
    plan: Plan = plan_from_decisions(profile, {profile.activations[0].id: "swap"})
    for microbatches in (2**45, 2**62):
        with pytest.raises(UsageError, match="beyond all memory"):
            simulate(profile, replace(plan, microbatches_in_flight=microbatches))


def test_a_profile_of_more_microbatches_than_any_memory_holds_is_inconsistent() -> None:
    profile = replace(blocks(3), in_flight=InFlight(2**53 + 1, 0, 0))
    assert profile.fault() == f"{2**53 + 1} microbatches in flight are beyond all memory"
    assert replace(profile, in_flight=InFlight(4, 0, 0)).fault() is None


def test_a_sharded_profile_with_microbatches_in_flight_is_not_planned_either() -> None:
    profile = sharded(random_profile(Random(5), 12), Random(5))
    assert profile.gathered
    with pytest.raises(UsageError, match="FSDP gathers parameters"):
        pooch.plan(replace(profile, in_flight=InFlight(25, 0, 0)), 10**9, policy="swap_all")


def test_a_message_is_one_line_that_a_terminal_may_be_shown() -> None:
    told = str(PoochError("a name\nof two lines with \x1b[2J in it" + "x" * 10_000 + ": the remedy"))
    assert told.startswith("a name of two lines with \\x1b[2J in it")
    assert told.endswith("x: the remedy")
    assert len(told) < 1500


@pytest.mark.parametrize("kind", ["keep", "temporary"])
def test_an_arena_with_a_block_that_the_step_does_not_have_is_of_another_profile(kind: str) -> None:
    profile = blocks(3)
    plan = pooch.plan(profile, "80%", bound="arena", explain=False)
    assert plan.layout is not None
    odd = tuple(replace(each, target=1000) if each.kind == kind else each for each in plan.layout.blocks)
    changed = replace(plan, layout=replace(plan.layout, blocks=odd))
    assert changed != plan
    assert changed.fault() is None
    for use in (lives_of, simulate):
        with pytest.raises(PlanMismatch, match=f"its arena has a block {kind} 1000"):
            use(profile, changed)
