"""Random profiles, random decisions, random budgets: what is lowered verifies, and what verifies never faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.errors import InvalidSchedule
from pooch.ir import Choice, Schedule
from pooch.ir.dataflow import Dataflow
from pooch.schedule import lower, verify
from pooch.simulator import simulate
from tests import toys
from tests.schedule.interpreter import Fault, run_plain, run_schedule

moderate = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataflow, dict[int, Choice], Schedule]:
    dataflow = Dataflow(draw(toys.profiles()))
    decided = draw(toys.decisions(dataflow))
    peak = dataflow.profile.peak_bytes
    budget = draw(st.one_of(st.integers(1, peak), st.integers(peak // 2, peak + 10)))
    return dataflow, decided, lower(dataflow, decided, budget)


@moderate
@given(case=cases())
def test_lowered_schedules_verify_and_give_autograd_what_it_saved(case):
    dataflow, decided, schedule = case
    points = verify(dataflow, schedule, decided, None)
    timeline = simulate(dataflow, schedule)
    assert points == timeline.point_bytes.tolist()
    assert run_schedule(dataflow, schedule).points == points
    assert timeline.peak_bytes == max(points)
    verify(dataflow, schedule, decided, timeline.peak_bytes)
    with pytest.raises(InvalidSchedule, match="over the budget"):
        verify(dataflow, schedule, decided, timeline.peak_bytes - 1)
    for kind in sorted({action.kind for action in schedule.actions}):
        event(kind)
    if any(action.in_place for action in schedule.actions):
        event("in place")


@moderate
@given(case=cases(), data=st.data())
def test_a_mutated_schedule_is_rejected_or_harmless(case, data):
    dataflow, decided, schedule = case
    actions = list(schedule.actions)
    if not actions:
        return
    place = data.draw(st.integers(0, len(actions) - 1))
    mutation = data.draw(st.sampled_from(["omit", "swap", "repeat", "move", "outputs", "in_place"]))
    if mutation == "omit":
        del actions[place]
    elif mutation == "repeat":
        actions.insert(place, actions[place])
    elif mutation == "move":
        slots = [*dataflow.forward_slots, *dataflow.anchor_slots]
        moved = replace(actions.pop(place), slot=data.draw(st.sampled_from(slots)))
        actions = sorted([*actions, moved], key=lambda action: action.slot)
    elif mutation == "swap":
        other = data.draw(st.integers(0, len(actions) - 1))
        first, second = actions[place], actions[other]
        actions[place], actions[other] = replace(second, slot=first.slot), replace(first, slot=second.slot)
    elif actions[place].kind == "replay":
        op = dataflow.profile.ops[actions[place].target]
        key, pool = ("outputs", op.writes) if mutation == "outputs" else ("in_place", op.reads)
        subset = data.draw(st.sets(st.sampled_from(pool)))
        actions[place] = replace(actions[place], **{key: tuple(sorted(subset))})
    mutant = replace(schedule, actions=tuple(actions))
    try:
        points = verify(dataflow, mutant, decided, None)
    except InvalidSchedule:
        event("rejected")
        return
    event("harmless" if mutant != schedule else "unchanged")
    run = run_schedule(dataflow, mutant)
    assert run.points == points
    assert simulate(dataflow, mutant).point_bytes.tolist() == points


@moderate
@given(profile=toys.profiles())
def test_without_actions_everything_is_in_core(profile):
    dataflow = Dataflow(profile)
    schedule = lower(dataflow, {}, 1)
    assert schedule.actions == ()
    timeline = simulate(dataflow, schedule)
    assert timeline.point_bytes.tolist() == dataflow.in_core_points.tolist()
    assert timeline.step_ms == pytest.approx(sum(op.time_ms for op in profile.ops))
    assert (dataflow.in_core_points >= run_plain(dataflow).points).all()


@moderate
@given(case=cases())
def test_what_is_left_away_is_left_away_for_a_reason(case):
    """A budget that everything fits into moves nothing to the tier; a tighter one never raises the peak."""
    dataflow, decided, schedule = case
    roomy = lower(dataflow, decided, 1 << 60)
    assert roomy.swapped == ()
    assert simulate(dataflow, schedule).peak_bytes <= simulate(dataflow, roomy).peak_bytes


def test_the_interpreter_notices_wrong_contents():
    """The oracle itself can fail: an unwaited copy, a value never brought back."""
    dataflow = Dataflow(toys.chain(6))
    decided = toys.some_decisions(dataflow, "s")
    schedule = lower(dataflow, decided, 30)
    assert schedule.swapped
    for kind in ("wait", "copy_in", "copy_out"):
        actions = tuple(action for action in schedule.actions if action.kind != kind)
        with pytest.raises(Fault):
            run_schedule(dataflow, replace(schedule, actions=actions))
