"""A plan alone, without its profile: what could not be executed is told before anything is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import InvalidSchedule, PlanMismatch
from pooch.ir import Action, Plan, Profile, Region, Schedule
from pooch.ir.executable import check_executable, check_plan
from tests.executor.support import tight_plan
from tests.toys import ToyStep, profiles, random_decisions

PAGE = 4096


def step() -> Profile:
    """Two swapped values, one recomputed through an intermediate in place, and a source."""
    told = ToyStep(round_bytes=PAGE)
    current = told.external(PAGE)
    for _ in range(3):
        (current,) = told.op([current], [PAGE], saves=[current])
    (between,) = told.op([current], [PAGE], saves=[current])
    (changed,) = told.op([between], [PAGE], overwrites=between, saves_outputs=[0])
    (current,) = told.op([changed], [PAGE], saves=[changed])
    told.op([current], [PAGE], saves=[current])
    return told.build()


@pytest.fixture
def plan() -> Plan:
    profile = step()
    values = [value.id for value in profile.activations]
    made = tight_plan(profile, dict(zip(values, ("swap", "swap", "keep", "recompute"), strict=False)))
    kinds = {action.kind for action in made.schedule.actions}
    assert kinds == {"copy_out", "free", "copy_in", "wait", "replay", "drop"}
    assert made.schedule.sources
    assert any(action.in_place for action in made.schedule.actions)
    assert check_plan(made) is None
    return made


def with_actions(plan: Plan, change: Callable[[list[Action]], object]) -> Plan:
    actions = list(plan.schedule.actions)
    change(actions)
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))


def with_schedule(plan: Plan, **fields: object) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, **fields))  # type: ignore[arg-type]


def place(actions: list[Action], kind: str) -> int:
    return next(number for number, action in enumerate(actions) if action.kind == kind)


def told(plan: Plan) -> str:
    with pytest.raises(InvalidSchedule) as caught:
        check_executable(plan)
    assert "\n" not in str(caught.value)
    assert "`pooch plan`" in str(caught.value)
    return str(caught.value)


@given(profiles(), st.integers(0, 2**32 - 1), st.sampled_from(["step", "model"]))
@settings(max_examples=150, deadline=None)
def test_every_plan_that_is_made_can_be_executed(profile: Profile, seed: int, region: Region) -> None:
    assume(region == "step" or profile.model_begin < profile.model_end)  # else there is nothing to plan
    decisions = random_decisions(Random(seed), Dataflow(profile, region))
    assert check_plan(tight_plan(profile, decisions, region)) is None
    assert check_plan(plan_from_decisions(profile, decisions, region=region)) is None


@pytest.mark.parametrize("kind", ["copy_out", "free", "copy_in", "wait", "replay", "drop"])
def test_no_action_can_be_left_out(plan: Plan, kind: str) -> None:
    told(with_actions(plan, lambda actions: actions.pop(place(actions, kind))))


@pytest.mark.parametrize("kind", ["copy_out", "free", "copy_in", "wait", "drop"])
def test_no_action_can_come_twice(plan: Plan, kind: str) -> None:
    def twice(actions: list[Action]) -> None:
        where = place(actions, kind)
        actions.insert(where, actions[where])

    told(with_actions(plan, twice))


@pytest.mark.parametrize("kind", ["copy_out", "free", "copy_in", "wait", "replay", "drop"])
@pytest.mark.parametrize("target", [0, 999, -1])
def test_targets_that_are_none(plan: Plan, kind: str, target: int) -> None:
    def aim(actions: list[Action]) -> None:
        where = place(actions, kind)
        actions[where] = replace(actions[where], target=target)

    told(with_actions(plan, aim))


def test_two_values_in_one_room(plan: Plan) -> None:
    first, second = plan.schedule.host_offsets
    shared = with_schedule(plan, host_offsets=(first, (second[0], first[1])))
    assert "overlap in the tier" in told(shared)


@pytest.mark.parametrize(
    ("rooms", "fault"),
    [
        (lambda r: (r[0], (r[1][0], r[1][1] + 8)), "outside the tier"),
        (lambda r: ((r[0][0], -PAGE), r[1]), "outside the tier"),
        (lambda r: (r[0], r[0]), "layout"),
        (lambda r: r[:1], "layout"),
    ],
)
def test_rooms_that_are_none(
    plan: Plan, rooms: Callable[[tuple[tuple[int, int], ...]], tuple[tuple[int, int], ...]], fault: str
) -> None:
    assert fault in told(with_schedule(plan, host_offsets=rooms(plan.schedule.host_offsets)))


def test_a_tier_larger_than_what_is_swapped(plan: Plan) -> None:
    assert "more than the swapped values take" in told(with_schedule(plan, host_bytes=1 << 50))


def test_a_room_off_the_grid(plan: Plan) -> None:
    first, second = plan.schedule.host_offsets
    wide = with_schedule(plan, host_offsets=((first[0], 512), second), host_bytes=plan.schedule.host_bytes)
    assert "no multiple of" in told(wide)


def test_values_that_two_ops_make(plan: Plan) -> None:
    expected = list(plan.expected)
    expected[1] = replace(expected[1], writes=expected[0].writes)
    assert "written by two of its ops" in told(replace(plan, expected=tuple(expected)))


def test_what_an_op_makes_exchanged_with_what_a_replayed_one_makes(plan: Plan) -> None:
    replayed = next(action.target for action in plan.schedule.actions if action.kind == "replay")
    expected = list(plan.expected)
    expected[-1], expected[replayed] = (
        replace(expected[-1], writes=expected[replayed].writes),
        replace(expected[replayed], writes=expected[-1].writes),
    )
    assert "keeps what it does not write" in told(replace(plan, expected=tuple(expected)))


def test_decisions_that_say_otherwise(plan: Plan) -> None:
    other = tuple(replace(decision, choice="keep") for decision in plan.choices)
    assert "was decided" in told(replace(plan, choices=other))
    assert "was decided" in told(replace(plan, choices=()))


def test_a_source_that_is_recomputed_or_unknown(plan: Plan) -> None:
    for source in (*plan.schedule.recomputed, 999, -1):
        assert "cannot be held as a source" in told(with_schedule(plan, sources=(source,)))


def test_a_replay_over_what_is_still_needed(plan: Plan) -> None:
    def overwrite(actions: list[Action]) -> None:
        where = next(number for number, action in enumerate(actions) if action.in_place)
        actions[where] = replace(actions[where], in_place=(plan.schedule.sources[0],))

    assert "must not overwrite" in told(with_actions(plan, overwrite))


@pytest.mark.parametrize("by", [1, -1, 100])
def test_a_first_slot_that_is_another(plan: Plan, by: int) -> None:
    assert "first slot" in told(replace(plan, first_slot=plan.first_slot + by))


def test_anchors_that_come_before_the_way_back(plan: Plan) -> None:
    slots = [slot for slot, _ in plan.anchors]
    values = [ids for _, ids in plan.anchors]
    turned = tuple(zip(slots, reversed(values), strict=True))
    assert "unpacked but not present" in told(replace(plan, anchors=turned))
    assert "none of its ops makes" in told(replace(plan, anchors=(*plan.anchors[:-1], (slots[-1], (999,)))))
    assert "two anchors" in told(replace(plan, anchors=(*plan.anchors[:-1], (slots[-1], values[0]))))


@pytest.mark.parametrize(
    "numbers",
    [
        {"budget_bytes": -1}, {"budget_bytes": 1 << 60}, {"predicted_peak_bytes": -5}, {"in_core_peak_bytes": 10**30},
        {"predicted_step_ms": float("nan")}, {"in_core_step_ms": float("inf")}, {"lower_bound_ms": -1.0},
        {"planning_ms": float("nan")}, {"gap": 1.5}, {"gap": float("nan")}, {"gap": -0.1},
    ],
)  # fmt: skip
def test_numbers_that_are_none(plan: Plan, numbers: dict[str, float]) -> None:
    told(replace(plan, **numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"size_bytes": -1}, {"copy_ms": float("nan")}, {"keep_change_ms": float("nan")}])
def test_rows_with_numbers_that_are_none(plan: Plan, fields: dict[str, float]) -> None:
    first, *others = plan.choices
    told(replace(plan, choices=(replace(first, **fields), *others)))  # type: ignore[arg-type]


def test_a_plan_that_keeps_everything_is_fine() -> None:
    plan = plan_from_decisions(step(), {})
    assert plan.schedule == Schedule((), (), (), (), (), 0)
    check_executable(plan)


def test_a_plan_with_other_anchors_or_another_first_slot_is_none_of_the_profile(plan: Plan) -> None:
    simulate(step(), plan)
    for other in (replace(plan, first_slot=1), replace(plan, anchors=plan.anchors[:-1])):
        with pytest.raises(PlanMismatch, match="first slot or its anchors"):
            simulate(step(), other)
