"""Random profiles, random decisions, random budgets: what is lowered verifies, and what verifies never faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InvalidSchedule
from pooch.ir import Action, Choice, Profile, Region, Schedule
from pooch.schedule import lower, verify
from pooch.simulator import simulate
from tests import toys
from tests.schedule.interpreter import Fault, run_plain, run_schedule

moderate = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Case:
    dataflow: Dataflow
    decided: dict[int, Choice]
    schedule: Schedule
    budget_bytes: int
    least_bytes: int


def make_case(profile: Profile, region: Region, seed: int) -> Case:
    """Budgets from what these decisions can reach at least, to a little more than in-core."""
    random = Random(seed)
    dataflow = Dataflow(profile, region)
    decided = toys.random_decisions(random, dataflow)
    least = simulate(dataflow, lower(dataflow, decided, 1)).peak_bytes
    budget = random.randint(least - 10, max(least, profile.peak_bytes) + 10)
    return Case(dataflow, decided, lower(dataflow, decided, budget), budget, least)


steps = st.one_of(toys.profiles(), toys.sharded_profiles())
cases = st.builds(make_case, steps, st.sampled_from(["step", "step", "model"]), st.integers(0, 2**32 - 1))


def note_events(dataflow: Dataflow, schedule: Schedule) -> None:
    """So that `--hypothesis-show-statistics` tells what the examples reach."""
    for kind in sorted({action.kind for action in schedule.actions}):
        event(kind)
    values = dataflow.profile.values
    needed_late = [a for a in schedule.actions if a.kind == "drop" and values[a.target].saved]
    if any(action.in_place for action in schedule.actions):
        event("in place")
    if schedule.sources:
        event("held source")
    if any(values[action.target].death < action.slot for action in needed_late):
        event("held past its death")
    if schedule.swapped and schedule.recomputed:
        event("both")
    replayed = [action.target for action in schedule.actions if action.kind == "replay"]
    if any(dataflow.gathering.is_gathered(read) for op in replayed for read in dataflow.profile.ops[op].reads):
        event("read what is gathered")
    waits = {action.target: action.slot for action in schedule.actions if action.kind == "wait"}
    copies = [action for action in schedule.actions if action.kind == "copy_in"]
    if any(waits.get(action.target, action.slot) > action.slot for action in copies):
        event("prefetch")
    emptied = [action.target for action in schedule.actions if action.kind == "empty"]
    if len(emptied) > len(set(emptied)):
        event("emptied twice")
    if set(emptied) & set(schedule.recomputed):
        event("recomputed and emptied")
    if set(schedule.swapped) - {action.target for action in schedule.actions if action.kind == "free"}:
        event("away in the forward pass alone")


@moderate
@given(case=cases)
def test_lowered_schedules_verify_and_give_autograd_what_it_saved(case):
    dataflow, decided, schedule = case.dataflow, case.decided, case.schedule
    points = verify(dataflow, schedule, decided, None)
    timeline = simulate(dataflow, schedule)
    assert points == timeline.point_bytes.tolist()
    assert run_schedule(dataflow, schedule).points == points
    assert timeline.peak_bytes == max(points)
    verify(dataflow, schedule, decided, timeline.peak_bytes)
    with pytest.raises(InvalidSchedule, match="over the budget"):
        verify(dataflow, schedule, decided, timeline.peak_bytes - 1)
    note_events(dataflow, schedule)


@moderate
@given(case=cases, data=st.data())
def test_a_mutated_schedule_is_rejected_or_harmless(case, data):
    dataflow, decided, schedule = case.dataflow, case.decided, case.schedule
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
@given(case=cases)
def test_a_budget_that_the_decisions_can_keep_is_kept(case):
    """Leaving late and coming back early never costs a byte over what leaving at once would reach."""
    peak = simulate(case.dataflow, case.schedule).peak_bytes
    assert peak <= max(case.budget_bytes, case.least_bytes)
    roomy = lower(case.dataflow, case.decided, 1 << 60)
    assert roomy.swapped == ()
    assert peak <= simulate(case.dataflow, roomy).peak_bytes


@moderate
@given(case=cases)
def test_frees_are_late_and_copies_in_are_early(case):
    """One action slot later, or one anchor earlier, is over the budget (or out of order)."""
    if simulate(case.dataflow, case.schedule).peak_bytes > case.budget_bytes:
        return
    waits = {action.target: action.slot for action in case.schedule.actions if action.kind == "wait"}
    copies = [action for action in case.schedule.actions if action.kind == "copy_in"]
    assert [waits[copy.target] for copy in copies] == sorted(waits[copy.target] for copy in copies)
    for moved in [*later_leaving(case), *earlier_copies(case, copies), *earlier_refills(case)]:
        event("moved")
        with pytest.raises(InvalidSchedule):
            verify(case.dataflow, moved, case.decided, case.budget_bytes)


def later_leaving(case: Case) -> Iterator[Schedule]:
    """The schedules in which what left last at one slot leaves at the next slot that takes actions."""
    slots = sorted({*case.dataflow.forward_slots, *case.dataflow.anchor_slots})
    last: dict[int, tuple[tuple[int, int, int], Action]] = {}
    for order, action in leaving(case.schedule):
        last[action.slot] = max(last.get(action.slot, (order, action)), (order, action), key=lambda pair: pair[0])
    for slot, (_, action) in last.items():
        following = slots[slots.index(slot) + 1 :]
        if following:
            event(f"{action.kind} moved")
            others = [other for other in case.schedule.actions if other is not action]
            begin = sum(other.slot < following[0] for other in others)
            while begin < len(others) and others[begin].kind == "copy_out" and others[begin].slot == following[0]:
                begin += 1
            others.insert(begin, replace(action, slot=following[0]))
            yield replace(case.schedule, actions=tuple(others))


def leaving(schedule: Schedule) -> Iterator[tuple[tuple[int, int, int], Action]]:
    """Each action by which bytes leave, with its place in the order in which they leave at one slot."""
    refills = [action for action in schedule.actions if action.kind == "refill"]
    empty: set[int] = set()
    for action in schedule.actions:
        back = min((r.slot for r in refills if r.target == action.target and r.slot > action.slot), default=None)
        if action.kind == "empty":
            empty.add(action.target)
            need = 0 if back is None else need_after(schedule, action.target, back)
            rank = 2 if back is not None else 0 if action.target in schedule.recomputed else 1
            yield (rank, -need, action.target), action
        elif action.kind == "free" and action.target not in empty:
            yield (1, 0, action.target), action
        elif action.kind == "refill":
            empty.discard(action.target)


def need_after(schedule: Schedule, value: int, slot: int) -> int:
    """Where the copy back that starts at `slot` is waited for."""
    return min(a.slot for a in schedule.actions if a.kind == "wait" and a.target == value and a.slot >= slot)


def earlier_refills(case: Case) -> Iterator[Schedule]:
    """The schedules in which a refill starts a slot earlier, last in that entry, but not before its fellows."""
    refills = [action for action in case.schedule.actions if action.kind == "refill"]
    refills.sort(key=lambda action: need_after(case.schedule, action.target, action.slot))
    for place, refill in enumerate(refills):
        emptied = max(
            action.slot
            for action in case.schedule.actions
            if action.kind == "empty" and action.target == refill.target and action.slot < refill.slot
        )
        earlier = refill.slot - 1
        if earlier > emptied and (place == 0 or earlier >= refills[place - 1].slot):
            event("refill moved")
            others = [other for other in case.schedule.actions if other is not refill]
            others.insert(sum(other.slot <= earlier for other in others), replace(refill, slot=earlier))
            yield replace(case.schedule, actions=tuple(others))


def earlier_copies(case: Case, copies: list[Action]) -> Iterator[Schedule]:
    """The schedules in which one copy in starts an anchor earlier, last in that entry, but not before its fellows."""
    freed = {action.target: action.slot for action in case.schedule.actions if action.kind == "free"}
    anchors = case.dataflow.anchor_slots
    for place, copy in enumerate(copies):
        earlier = anchors[anchors.index(copy.slot) - 1] if copy.slot > anchors[0] else -1
        before = copies[place - 1].slot if place else -1
        if earlier > freed[copy.target] and earlier >= before:
            others = [other for other in case.schedule.actions if other is not copy]
            others.insert(sum(other.slot <= earlier for other in others), replace(copy, slot=earlier))
            yield replace(case.schedule, actions=tuple(others))


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
