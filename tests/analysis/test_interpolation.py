"""Profiles for other shapes are those that a profiler would make there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import pooch
from pooch.analysis.interpolation import Interpolation, KnownStep, carried_over, interpolated_profile
from pooch.errors import PlanMismatch
from pooch.ir import Profile
from tests.analysis.steps import (
    branching_model,
    fake_profile,
    image_model,
    known_steps,
    language_model,
    points,
    without_times,
)

pytestmark = pytest.mark.cpu  # the models are small, and profiled without running them

CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], tuple[int, ...]]] = {
    "length": (language_model, [(2, 64), (2, 128), (2, 256)], (2, 192)),
    "a longer one": (language_model, [(2, 64), (2, 128), (2, 256)], (2, 384)),
    "a shorter one": (language_model, [(2, 64), (2, 128), (2, 256)], (2, 33)),
    "tokens": (language_model, [(2, 64), (4, 64)], (7, 64)),
    "batch and length": (language_model, [(2, 64), (2, 128), (2, 256), (4, 64), (4, 128), (4, 256)], (3, 192)),
    "images": (image_model, [(2, 3, 16, 16), (4, 3, 16, 16), (16, 3, 16, 16)], (9, 3, 16, 16)),
    "side": (image_model, [(4, 3, 16, 16), (4, 3, 24, 24), (4, 3, 64, 64)], (4, 3, 48, 48)),
    "two sides": (image_model, [(4, 3, 16, 16), (4, 3, 24, 32), (4, 3, 32, 20)], (4, 3, 48, 16)),
}


def predicted(build: Callable[..., Any], known: list[tuple[int, ...]], asked: tuple[int, ...]) -> Profile:
    made = interpolated_profile(known_steps(build, *known), asked)
    assert made.profile is not None, made.reason
    return made.profile


@pytest.mark.parametrize("case", CASES)
def test_every_size_and_point_is_that_of_a_profile_at_the_shape(case: str) -> None:
    build, known, asked = CASES[case]
    made = interpolated_profile(known_steps(build, *known), asked)
    assert made.profile is not None, made.reason
    assert made.is_certain
    assert without_times(made.profile) == without_times(fake_profile(build, asked))


@pytest.mark.parametrize("case", ["length", "images", "side"])
def test_times_are_those_of_the_operators_at_the_shape(case: str) -> None:
    build, known, asked = CASES[case]
    made, true = predicted(build, known, asked), fake_profile(build, asked)
    assert [op.time_ms for op in made.ops] == pytest.approx([op.time_ms for op in true.ops])
    assert made.step_ms == pytest.approx(true.step_ms)


def test_what_becomes_large_enough_can_be_decided_on() -> None:
    # GIVEN values that are too small for a plan at every known shape
    known = [(2, 3, 16, 16), (3, 3, 16, 16), (4, 3, 16, 16)]
    before = {value.id for step in known_steps(image_model, *known) for value in step.profile.activations}
    # THEN they are activations where they are large enough
    made = predicted(image_model, known, (64, 3, 16, 16))
    assert {value.id for value in made.activations} > before
    assert made.values == fake_profile(image_model, (64, 3, 16, 16)).values


def test_what_becomes_too_small_cannot_be_decided_on() -> None:
    known = [(32, 3, 16, 16), (48, 3, 16, 16), (64, 3, 16, 16)]
    before = {value.id for value in fake_profile(image_model, known[0]).activations}
    made = predicted(image_model, known, (2, 3, 16, 16))
    assert {value.id for value in made.activations} < before
    assert made.values == fake_profile(image_model, (2, 3, 16, 16)).values


def test_dimensions_that_grew_together_cannot_be_told_apart() -> None:
    made = interpolated_profile(known_steps(language_model, (2, 64), (4, 128)), (2, 192))
    assert made.profile is None
    assert "only one of the input sizes is another" in made.reason


def test_too_few_shapes_give_bytes_on_the_high_side() -> None:
    made = interpolated_profile(known_steps(language_model, (2, 64), (2, 256)), (2, 192))
    true = fake_profile(language_model, (2, 192))
    assert made.profile is not None, made.reason
    assert not made.is_certain
    assert "approximate" in made.profile.notes[0]
    excesses = [mine - theirs for mine, theirs in zip(points(made.profile), points(true), strict=True)]
    assert min(excesses) >= 0
    assert 0 < max(excesses) <= made.uncertain_bytes
    assert made.profile.values == true.values  # sizes are exact even so


def test_where_the_allocator_rounds_no_point_is_too_low() -> None:
    # GIVEN a GPU, whose allocator rounds sizes up, so that they are not sums of anything
    known = [KnownStep(s, fake_profile(language_model, s, "V100-PCIe")) for s in ((2, 64), (4, 64))]
    made = interpolated_profile(known, (3, 64)).profile
    true = fake_profile(language_model, (3, 64), "V100-PCIe")
    assert made is not None
    assert made.sizes == "rounded"
    assert made.values == true.values
    assert any(value.allocated_bytes > value.size_bytes for value in true.values if value.shape[:1] == (3,))
    excesses = [mine - theirs for mine, theirs in zip(points(made), points(true), strict=True)]
    assert min(excesses) >= 0
    assert max(excesses) <= 8 * 512 + 1024


def test_a_known_shape_is_answered_with_its_own_profile() -> None:
    (step,) = known_steps(language_model, (2, 64))
    assert interpolated_profile([step], (2, 64)) == Interpolation(step.profile, is_certain=True)


def test_one_known_shape_is_not_enough() -> None:
    made = interpolated_profile(known_steps(language_model, (2, 64)), (2, 128))
    assert made.profile is None
    assert "at a second one" in made.reason


def test_a_batch_of_one_is_a_step_of_its_own() -> None:
    # GIVEN that a batch of one broadcasts where others do not, so that its ops are others
    alone, *others = known_steps(language_model, (1, 64), (2, 64), (4, 64))
    assert len(alone.profile.ops) != len(others[0].profile.ops)
    # THEN it is left out for larger ones, and larger ones tell nothing about it
    made = interpolated_profile([alone, *others], (3, 64))
    assert made.profile == interpolated_profile(others, (3, 64)).profile is not None
    assert interpolated_profile(others, (1, 64)).profile is None


def test_steps_that_take_different_paths_tell_nothing() -> None:
    made = interpolated_profile(known_steps(branching_model, (64, 64), (128, 64)), (96, 64))
    assert made.profile is None
    assert "different paths" in made.reason


@pytest.mark.parametrize("field", ["death", "release", "saved", "touches", "label"])
def test_values_that_live_otherwise_are_another_path(field: str) -> None:
    first, second, third = known_steps(image_model, *CASES["images"][1])
    value = second.profile.activations[0]
    other: dict[str, Any] = {"death": value.death + 1, "release": value.release + 1, "saved": False}
    changed = replace(value, **{field: other.get(field, ("something else",))})
    values = tuple(changed if v.id == value.id else v for v in second.profile.values)
    altered = KnownStep(second.shapes, replace(second.profile, values=values))
    reason = interpolated_profile([first, altered, third], (9, 3, 16, 16)).reason
    assert f"value {value.id} " in reason
    assert f"its {field} is" in reason


def test_a_size_that_is_no_whole_number_is_refused() -> None:
    # GIVEN a network that halves its images, known at even sides
    made = interpolated_profile(known_steps(image_model, (4, 3, 16, 16), (4, 3, 24, 24)), (4, 3, 33, 33))
    assert made.profile is None
    assert "would be 16.5" in made.reason


def test_odd_sides_are_told_by_odd_sides() -> None:
    odd = known_steps(image_model, (4, 3, 17, 17), (4, 3, 25, 25), (4, 3, 65, 65))
    made = interpolated_profile(odd, (4, 3, 33, 33)).profile
    assert made is not None
    assert made.values == fake_profile(image_model, (4, 3, 33, 33)).values


def test_shapes_of_another_family_tell_nothing() -> None:
    assert interpolated_profile(known_steps(language_model, (2, 64)), (2, 64, 64)).profile is None


def test_an_interpolated_profile_is_planned_and_its_plan_holds_in_the_true_step() -> None:
    build, known, asked = CASES["length"]
    made, true = predicted(build, known, asked), fake_profile(build, asked)
    plan = pooch.plan(made, "60%", time_limit_s=5)
    assert pooch.simulate(made, plan).peak_bytes <= plan.budget_bytes
    assert pooch.simulate(true, plan).peak_bytes == plan.predicted_peak_bytes  # verified against the true step
    assert any(note.startswith("modelled for the shape (2, 192)") for note in plan.notes)


def test_decisions_of_a_longer_step_fit_a_shorter_one() -> None:
    longer, shorter = (fake_profile(language_model, (2, length)) for length in (256, 192))
    plan = pooch.plan(longer, "60%", time_limit_s=5)
    carried = carried_over(plan.decisions, longer, shorter)
    assert carried == plan.decisions
    assert shorter.peak_bytes > plan.budget_bytes
    assert pooch.plan_from_decisions(shorter, carried, plan.budget_bytes).predicted_peak_bytes <= plan.budget_bytes


def test_what_is_fixed_at_the_other_shape_has_no_decision_there() -> None:
    larger, smaller = (fake_profile(image_model, (batch, 3, 16, 16)) for batch in (64, 2))
    decided = dict.fromkeys((value.id for value in larger.activations), "swap")
    carried = carried_over(decided, larger, smaller, "step")
    assert set(carried) == {value.id for value in smaller.activations} < set(decided)
    assert set(carried.values()) == {"swap"}


def test_what_is_an_activation_only_at_the_other_shape_is_kept() -> None:
    larger, smaller = (fake_profile(image_model, (batch, 3, 16, 16)) for batch in (64, 2))
    decided = dict.fromkeys((value.id for value in smaller.activations), "swap")
    carried = carried_over(decided, smaller, larger, "step")
    assert set(carried) == {value.id for value in larger.activations}
    assert {value for value, choice in carried.items() if choice == "swap"} == set(decided) < set(carried)


def test_decisions_are_not_carried_to_another_path() -> None:
    left, right = (fake_profile(branching_model, (rows, 64)) for rows in (64, 128))
    with pytest.raises(PlanMismatch, match="another path"):
        carried_over({}, left, right)
