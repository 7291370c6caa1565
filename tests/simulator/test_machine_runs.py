"""What the simulator says of a schedule is what the machine does under it: bytes at each point, and times."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.ir import HookCosts, Profile, Region
from pooch.schedule import lower
from pooch.simulator import simulate
from tests import toys
from tests.simulator.machine_runs import run_schedule

KINDS = ["copy_out", "free", "copy_in", "wait", "replay", "drop"]
steps = st.one_of(toys.profiles(), toys.sharded_profiles())


def without_emptying(profile: Profile) -> Profile:
    """The step whose values have been handed out, so that nothing is emptied while the program holds it."""
    return replace(profile, values=tuple(replace(value, touches=None) for value in profile.values))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profile=steps, region=st.sampled_from(["step", "model"]), seed=st.integers(0, 2**32 - 1))
def test_a_plan_takes_the_bytes_and_the_time_that_the_simulator_says(profile: Profile, region: Region, seed) -> None:
    random = Random(seed)
    hooks = random.choice([HookCosts(), HookCosts(replay_ms=0.25, copy_ms=0.5)])
    dataflow = Dataflow(replace(without_emptying(profile), hooks=hooks), region)
    schedule = lower(dataflow, toys.random_decisions(random, dataflow), random.randint(1, profile.peak_bytes))
    for kind in sorted({action.kind for action in schedule.actions}):
        event(kind)
    timeline, run = simulate(dataflow, schedule), run_schedule(dataflow, schedule)
    assert run.points == timeline.point_bytes.tolist()
    assert max(run.points) == timeline.peak_bytes
    assert run.starts_ms == pytest.approx(timeline.slot_start_ms.tolist())
    assert run.step_ms == pytest.approx(timeline.step_ms)
    assert run.stall_ms == pytest.approx(timeline.stall_ms)
    assert run.replay_ms == pytest.approx(timeline.replay_ms)


def test_the_plans_are_of_all_kinds() -> None:
    seen: set[str] = set()
    for seed in range(40):
        random = Random(seed)
        dataflow = Dataflow(without_emptying(toys.random_profile(random, 20)))
        schedule = lower(dataflow, toys.random_decisions(random, dataflow), 1)
        seen |= {action.kind for action in schedule.actions}
    assert seen == set(KINDS)
