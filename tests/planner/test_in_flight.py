"""Several microbatches in flight: all accounts of their memory agree on random steps, and the bounds hold."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.ir import Profile
from pooch.planner.candidates import Candidates
from pooch.schedule import verify
from tests.planner.support import case
from tests.planner.test_relaxation import assert_relaxed
from tests.toys import profiles, random_decisions

SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow]


def with_gradients(profile: Profile, random: Random) -> Profile:
    """The profile with gradients that some ops of its backward pass make and leave behind."""
    ops, added = [], 0
    for op in profile.ops:
        made = random.choice([0, 0, 30, 200]) if op.phase == "backward" and op.name != "pooch.end" else 0
        op = replace(op, entry_bytes=op.entry_bytes + added, gradient_bytes=made)
        added += made
        ops.append(replace(op, peak_bytes=op.peak_bytes + added))
    return replace(profile, ops=tuple(ops), peak_bytes=max(op.peak_bytes for op in ops))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(profiles(max_ops=12), st.sampled_from([2, 3, 5]), st.sampled_from([0.0, 0.3, 0.8]), st.randoms())
def test_lowering_and_verifier_agree_and_no_plan_goes_below_what_it_needs(
    profile: Profile, microbatches: int, share: float, random: Random
) -> None:
    of = case(with_gradients(profile, random).with_in_flight(microbatches))
    assume(of.dataflow.activations)
    decisions = random_decisions(random, of.dataflow)
    evaluation = of.evaluator.evaluate(decisions, of.share(share))
    points = evaluation.timeline.point_bytes
    assert verify(of.dataflow, evaluation.schedule, decisions, int(points.max())) == points.tolist()
    assert (points >= Candidates(of.dataflow).least_points(decisions)).all()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(
    profiles(max_ops=10), st.sampled_from([2, 4]), st.sampled_from([0.2, 0.8]), st.sampled_from([3, 48]), st.randoms()
)
def test_random_plans_satisfy_the_program(
    profile: Profile, microbatches: int, share: float, pieces: int, random: Random
) -> None:
    of = case(with_gradients(profile, random).with_in_flight(microbatches))
    assume(len(of.dataflow.activations) >= 2)
    assert_relaxed(of, random_decisions(random, of.dataflow), of.share(share), pieces, merge=random.random() < 0.5)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(profiles(max_ops=10), st.sampled_from([2, 3]), st.randoms())
def test_a_step_under_a_schedule_beside_others_that_stopped_between_their_passes(
    profile: Profile, microbatches: int, random: Random
) -> None:
    """What the others hold is what the schedule leaves alive after the forward pass, counted here value by value."""
    widened = profile.with_in_flight(microbatches)
    decisions = random_decisions(random, Dataflow(profile))
    evaluation = StageEvaluator(Dataflow(widened)).evaluate(decisions, int(0.4 * widened.peak_bytes))
    turn = profile.forward_ops
    schedule = evaluation.schedule
    last = {a.target: a.kind for a in schedule.actions if a.kind in ("free", "empty", "refill") and a.slot < turn}
    away = {value for value, kind in last.items() if kind != "refill"}
    held = set(schedule.sources)
    alive = sum(
        value.allocated_bytes
        for value in profile.values
        if value.producer >= 0
        and value.id not in away
        and (value.death >= turn or value.id in held)
        and not (value.id in schedule.recomputed and value.release < turn)
    )
    made = sum(v.allocated_bytes for v in profile.values if v.producer >= 0 and v.death >= turn)
    resident = profile.ops[turn].entry_bytes - profile.persistent_bytes - made + alive
    alone = verify(Dataflow(profile), schedule, decisions, None)
    beside = [own + (microbatches - 2) * resident + max(resident, gone) for own, gone in _pairs(alone, widened)]
    assert evaluation.timeline.point_bytes.tolist() == beside


def _pairs(points: list[int], profile: Profile) -> list[tuple[int, int]]:
    missing = profile.missing_gradients()
    return [(own, missing[point // 2]) for point, own in enumerate(points)]
