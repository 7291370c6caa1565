"""The host side in plans: how many ranks share the link, one queue or two, a slow tier, and the tier's own budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pooch.errors import InfeasibleBudget
from pooch.ir import Link, Profile
from pooch.ir.consistency import check_profile
from pooch.planner.candidates import Candidates
from tests.planner.support import Case, case, make_plan, oracle_ms, oracle_peak
from tests.toys import chain

LINK = Link("toy tier", 0.1, 0.1, 40.0, 40.0)


def profile_with(link: Link) -> Profile:
    return chain(6, link=link, size_bytes=16)


def between(of: Case) -> int:
    low = oracle_peak(of)
    return low + (of.profile.peak_bytes - low) // 3


def test_ranks_divide_the_rates_and_not_the_latency() -> None:
    link = replace(LINK, ranks=4)
    assert link.out_ms(80) == pytest.approx(0.1 + 4 * 2.0)
    assert link.in_ms(80) == pytest.approx(0.1 + 4 * 2.0)
    assert check_profile(profile_with(replace(LINK, ranks=0))) == "0 ranks share the link"


def test_the_more_ranks_share_the_link_the_less_is_swapped() -> None:
    alone, crowded = case(profile_with(LINK)), case(profile_with(LINK).shared_by(64))
    few = make_plan(alone.dataflow, between(alone), alone.evaluator)
    many = make_plan(crowded.dataflow, between(crowded), crowded.evaluator)
    assert few.schedule.swapped
    assert len(many.schedule.swapped) < len(few.schedule.swapped)
    assert many.timeline.step_ms > few.timeline.step_ms


LINKS = {
    "one queue": replace(LINK, full_duplex=False),
    "four ranks": replace(LINK, ranks=4),
    "slow tier": replace(LINK, out_latency_ms=2.0, in_latency_ms=3.0, out_bytes_per_ms=8.0, in_bytes_per_ms=4.0),
    "slows compute": replace(LINK, out_compute_share=0.5, in_compute_share=1.0, full_duplex=False),
}


@pytest.mark.parametrize("host_values", [None, 1, 3])
@pytest.mark.parametrize("name", sorted(LINKS))
def test_every_kind_of_link_and_tier_is_planned_as_well_as_the_oracle_does(name: str, host_values: int | None) -> None:
    # GIVEN a link, and a tier for so many values (each takes a page of 4096 bytes there)
    of = case(profile_with(LINKS[name]))
    host_bytes = None if host_values is None else host_values * 4096
    best_ms = oracle_ms(of, between(of), host_bytes)
    assert best_ms is not None
    # WHEN it is planned
    planned = make_plan(of.dataflow, between(of), of.evaluator, host_budget_bytes=host_bytes)
    # THEN the tier is kept, and nothing is better
    assert host_bytes is None or planned.schedule.host_bytes <= host_bytes
    assert planned.timeline.step_ms <= best_ms * 1.01
    assert planned.lower_bound_ms <= best_ms + 1e-6


def test_what_is_larger_than_the_tier_cannot_be_swapped() -> None:
    of = case(profile_with(LINK))
    assert any(item.can_swap for item in Candidates(of.dataflow, None, 16).items)
    assert not any(item.can_swap or item.can_wait for item in Candidates(of.dataflow, None, 15).items)


@pytest.mark.parametrize("layers", [24, 40])
def test_without_a_tier_replays_between_checkpoints_need_little(layers: int) -> None:
    of = case(chain(layers, link=LINK, size_bytes=16))
    with pytest.raises(InfeasibleBudget) as told:
        make_plan(of.dataflow, 1, of.evaluator, host_budget_bytes=1)
    smallest = told.value.minimum_bytes
    assert smallest <= 16 * (2.2 * layers**0.5 + 1)  # Chen et al. (2016): about twice the square root
    plan = make_plan(of.dataflow, smallest, of.evaluator, host_budget_bytes=1)
    assert plan.timeline.peak_bytes <= smallest
    assert not plan.schedule.swapped
