"""Made-up steps whose sizes follow their shapes by known rules."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pooch.analysis.interpolation import KnownStep, carried_over, interpolated_profile
from pooch.analysis.interpolation.dimensions import CannotTell, SizeRule, varying_dimensions
from pooch.api.hooked import dataflow_of
from pooch.api.manual import plan_from_decisions
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from pooch.simulator import simulate
from tests import toys
from tests.analysis.steps import points, without_times

Shape = tuple[int, ...]
moderate = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
SQUARES = [(2, 100), (2, 130), (2, 170), (5, 100), (5, 130), (5, 170)]


def made_step(seed: int, shape: Shape, *, besides: bool) -> Profile:
    """A step of random ops; each size is a random multiple of one product of batch and length.

    Args:
        seed: Of everything but the shape.
        shape: (batch, length).
        besides: Whether gradients and workspaces come on top of the values.
    """
    random = Random(seed)
    batch, length = shape

    def size() -> int:
        product = random.choice([1, batch, length, batch * length, batch * length, batch * length * length])
        return random.randint(1, 5000) * product

    step = toys.ToyStep()
    made = [step.external(size())]
    for _ in range(random.randint(2, 12)):
        reads = random.sample(made, min(len(made), random.randint(1, 3)))
        saves = [value for value in reads if random.random() < 0.6]
        gradient, workspace = size() * besides, size() * besides
        is_in_place = step.values[reads[0]].role == "made" and random.random() < 0.2
        if is_in_place:
            made.remove(reads[0])
        made += step.op(
            reads, [size()], saves=saves, saves_outputs=[0] if random.random() < 0.4 else [],
            overwrites=reads[0] if is_in_place else -1, gradient_bytes=gradient, workspace_bytes=workspace,
            time_ms=1e-3 * batch * length,
        )  # fmt: skip
        if random.random() < 0.2:
            step.hold(made[-1], None)
    return step.build(toys.FAST_LINK, persistent_bytes=1000)


def known_steps(seed: int, shapes: list[Shape], *, besides: bool) -> list[KnownStep]:
    return [KnownStep(shape, made_step(seed, shape, besides=besides)) for shape in shapes]


@moderate
@given(seed=seeds, batch=st.integers(2, 9), length=st.integers(2, 400))
def test_steps_without_hidden_bytes_are_predicted_exactly(seed: int, batch: int, length: int) -> None:
    made = interpolated_profile(known_steps(seed, SQUARES, besides=False), (batch, length))
    assert made.profile is not None, made.reason
    assert without_times(made.profile) == without_times(made_step(seed, (batch, length), besides=False))


@moderate
@given(seed=seeds, length=st.integers(101, 399))
def test_between_two_lengths_no_point_is_too_low(seed: int, length: int) -> None:
    made = interpolated_profile(known_steps(seed, [(3, 100), (3, 400)], besides=True), (3, length))
    assert made.profile is not None, made.reason
    true = made_step(seed, (3, length), besides=True)
    assert made.profile.values == true.values
    assert all(mine >= theirs for mine, theirs in zip(points(made.profile), points(true), strict=True))


@moderate
@given(seed=seeds, batch=st.integers(2, 9), length=st.integers(2, 400), count=st.integers(2, 6))
def test_whatever_is_predicted_is_consistent(seed: int, batch: int, length: int, count: int) -> None:
    shapes = Random(seed).sample(SQUARES, count)
    made = interpolated_profile(known_steps(seed, shapes, besides=True), (batch, length))
    assert (made.profile is None) == bool(made.reason)
    if made.profile is not None:
        assert check_profile(made.profile) is None
        ops = made.profile.ops
        assert all(op.peak_bytes >= following.entry_bytes for op, following in pairwise(ops))


@moderate
@given(seed=seeds, choices=seeds)
def test_decisions_carried_to_a_shorter_step_can_be_lowered_and_simulated(seed: int, choices: int) -> None:
    longer, shorter = (made_step(seed, (3, length), besides=True) for length in (300, 150))
    decided = toys.random_decisions(Random(choices), dataflow_of(longer, "step", hooked=False))
    carried = carried_over(decided, longer, shorter, "step")
    plan = plan_from_decisions(shorter, carried, region="step")
    assert plan.decisions == carried
    assert simulate(dataflow_of(shorter, "step", hooked=True), plan.schedule).peak_bytes == plan.predicted_peak_bytes


@given(
    factor=st.integers(1, 999), constant=st.integers(0, 3), sizes=st.lists(st.integers(2, 999), min_size=3, unique=True)
)
def test_a_multiple_and_a_constant_are_found(factor: int, constant: int, sizes: list[int]) -> None:
    rule = SizeRule(varying_dimensions([(size,) for size in sizes]))
    *known, asked = [factor * size + constant for size in sizes]
    assert rule.predict(tuple(known)) == asked


@pytest.mark.parametrize(
    ("dimensions", "known", "asked"),
    [
        ([(2, 3, 5), (64, 80, 96)], (128, 240), 480),  # flattened
        ([(224, 256, 320)], (197, 257), 401),  # patches of 16 by 16 pixels, and one token more
        ([(64, 128, 192)], (7, 7), 7),
        ([(64, 128, 192)], (32, 64), 96),
    ],
)
def test_sizes_follow_the_simplest_rule(dimensions: list[Shape], known: Shape, asked: int) -> None:
    assert SizeRule(dimensions).predict(known) == asked


@pytest.mark.parametrize("known", [(3, 1), (64, 0), (5, 5000, 7)])
def test_sizes_without_a_rule_are_refused(known: Shape) -> None:
    sizes = [(64,), (128,), (256,), (512,)][: len(known) + 1]
    with pytest.raises(CannotTell):
        SizeRule(varying_dimensions(sizes)).predict(known)


def test_sizes_that_vary_together_are_one_dimension() -> None:
    shapes = [(2, 64, 2, 64, 16), (4, 64, 4, 64, 16), (8, 32, 8, 32, 8)]
    assert varying_dimensions(shapes) == ((2, 4, 8), (64, 64, 32))
