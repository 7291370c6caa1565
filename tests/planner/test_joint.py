"""The program of everything on the device is a relaxation: no plan is faster than its optimum, whatever moves."""

from __future__ import annotations

import math
from random import Random

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.occupancy import occupancy
from pooch.analysis.persistence import Cycle, residence, with_resident
from pooch.api.evaluation import StageEvaluator
from pooch.ir import Profile
from pooch.planner.candidates import Candidates
from pooch.planner.program.marks import choose_marks
from pooch.planner.program.solver import Limits, solve
from pooch.planner.program.step_program import StepProgram
from pooch.schedule import verify_residence
from pooch.simulator import simulate_moving
from tests.persistent_toys import persistent_profiles
from tests.toys import random_decisions

FILTERS = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=FILTERS)
@given(
    persistent_profiles(),
    st.sampled_from([0.1, 0.4, 0.7, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1, 3, 48]),
    st.booleans(),
    st.randoms(),
)
def test_random_plans_in_which_everything_moves_satisfy_the_program(
    profile: Profile, share: float, allowance: float, pieces: int, merge: bool, random: Random
) -> None:
    # GIVEN any decisions on activations, any share of the budget for what outlives the step, and who is away then
    cycle = Cycle(profile)
    allowed = cycle.allowed_points(int(allowance * cycle.in_core_bytes))
    dataflow = Dataflow(with_resident(profile, allowed))
    bare = Dataflow(with_resident(profile))
    decisions = random_decisions(random, bare)
    lowered_bytes = int(share * profile.peak_bytes)
    schedule = StageEvaluator(dataflow).evaluate(decisions, lowered_bytes).schedule
    others = occupancy(bare, schedule.actions, schedule.recomputed).point_bytes
    needed = int((others + cycle.allowed_points(0)).max())
    after = int((cycle.need_bytes + cycle.temporary_bytes)[bare.end :].max(initial=0)) + int(others[-2])
    budget_bytes = max(lowered_bytes, needed, after) + random.choice([0, 0, 10, 50])
    found = residence(cycle, cycle.room_bytes(budget_bytes, others))
    assume(found is not None)
    assert found is not None
    step = simulate_moving(bare, schedule, found, detail=False)
    verify_residence(found, step.timeline, budget_bytes)
    # WHEN the program is solved with these decisions
    candidates = Candidates(bare)
    built = StepProgram(candidates, choose_marks(candidates, pieces), budget_bytes, merge=merge, cycle=cycle)
    carried_out = {
        value: "swap" if value in schedule.swapped else "recompute" if value in schedule.recomputed else "keep"
        for value in candidates.dataflow.activation_ids
    }
    for variable, value in built.values_of(carried_out).items():
        built.problem += variable == value, f"fixed_{variable.name}"
    solution = solve(built.problem, Limits(gap=0.0, nodes=10, time_s=20.0))
    # THEN it allows what the simulator showed
    assert solution.bound < math.inf
    assert solution.objective <= step.timeline.step_ms * (1 + 1e-6) + 1e-6
