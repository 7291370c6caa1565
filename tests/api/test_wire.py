"""What passes between processes arrives equal, and nothing else than known data classes is ever made of it."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import pooch
from pooch.analysis.interpolation import KnownStep
from pooch.api.options import PlanOptions
from pooch.api.wire import PLANNING, WIRE, Wire
from pooch.autopilot.jobs import Answer, Job
from pooch.errors import WireError
from pooch.ir import Plan, Profile
from tests.toys import blocks, in_full

PROFILES = sorted((Path(__file__).parents[2] / "profiles").glob("*.json"))


@dataclass(frozen=True, slots=True)
class Pair:
    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True)
class Alone:
    only: Any


PAIRS = Wire(Pair, Alone)
SCALARS = (
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(some.characters()) |
    some.sampled_from([math.inf, -math.inf, -0.0, "dict", "Pair", "\ud800\n"])
)  # fmt: skip
HASHABLE = some.recursive(SCALARS, lambda inner: some.tuples(inner, inner) | some.builds(Pair, inner, inner))
VALUES = some.recursive(
    HASHABLE,
    lambda inner: (
        some.lists(inner) | some.lists(inner).map(tuple) | some.frozensets(HASHABLE) | some.builds(Alone, inner) |
        some.dictionaries(HASHABLE, inner) | some.builds(Pair, inner, inner)
    ),
    max_leaves=20,
)  # fmt: skip


def passed(value: Any, wire: Wire = PAIRS) -> Any:
    line = json.dumps(wire.plain(value))
    assert "\n" not in line
    return wire.made(json.loads(line))


def exactly(value: Any) -> Any:
    """The value with the types of all its parts, since 1, 1.0 and True are equal."""
    if is_dataclass(value):
        value = (type(value).__name__, *(getattr(value, field.name) for field in fields(value)))
    if isinstance(value, dict):
        value = {"dict": [*value.items()]}["dict"]
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, map(exactly, value)))
    return (type(value), tuple(map(exactly, value))) if isinstance(value, (tuple, list)) else (type(value), value)


@given(VALUES)
@settings(deadline=None)
def test_what_is_told_arrives_equal_and_of_the_same_types(value: Any) -> None:
    assert passed(value) == value
    assert exactly(passed(value)) == exactly(value)


def test_numbers_of_numpy_and_versions_of_torch_arrive_as_plain_ones() -> None:
    assert math.isnan(passed(math.nan))
    assert exactly(passed((numpy.float64(0.1), torch.__version__))) == exactly((0.1, str(torch.__version__)))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_plans_and_jobs_arrive_equal(path: Path) -> None:
    profile = Profile.load(path)
    swapped = pooch.plan_from_decisions(profile, {value.id: "swap" for value in profile.activations[:9]})
    plan = replace(swapped, choices=tuple(replace(choice, replay_ms=math.inf) for choice in swapped.choices))
    options = PlanOptions(policy_options={"n_tensors": 3, "shares": [0.5, {1: "a"}]}, host_budget="1GiB")
    job = Job((3, 4), (KnownStep((3,), profile), KnownStep((5,), profile)), 5, 7, options, plan)
    assert passed(job, WIRE) == job
    assert passed(Answer(profile, plan, 3, "why"), WIRE) == Answer(profile, plan, 3, "why")


def test_a_plan_with_an_arena_arrives_equal() -> None:
    plan = pooch.plan(blocks(3), "90%", bound="arena", explain=False)
    assert plan.layout is not None
    assert in_full(passed(plan, WIRE)) == in_full(plan)


def classes_of(hint: Any) -> set[type]:
    """The data classes that a type hint names."""
    found = {hint} if is_dataclass(hint) else set()
    return found.union(*(classes_of(argument) for argument in typing.get_args(hint)))


def test_every_data_class_that_a_job_or_an_answer_can_hold_may_pass() -> None:
    known: set[type] = set()
    ahead: set[type] = {Job, Answer, Plan, Profile}
    while ahead:
        kind = ahead.pop()
        known.add(kind)
        hints = typing.get_type_hints(kind)
        for hint in hints.values():
            if typing.get_origin(hint) is not ClassVar:
                ahead |= classes_of(hint) - known
    assert known == {*PLANNING, Job, Answer, KnownStep}


class Odd(int):
    pass


@pytest.mark.parametrize("value", [object(), Odd(3), {1, 2}, Path("here"), b"bytes", print, Pair, (1, [Odd(1)])])
def test_what_is_of_another_kind_is_not_told(value: Any) -> None:
    with pytest.raises(WireError, match="cannot be told to another process"):
        PAIRS.plain(value)


@pytest.mark.parametrize("name", ["Popen", "os.system", "Profile", "__reduce__", "tuple", ""])
def test_classes_that_are_not_known_are_refused(name: str) -> None:
    with pytest.raises(WireError, match="may not pass between processes") as refused:
        PAIRS.made([1, {"Pair": [{name: ["true"]}, 2]}])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "plain",
    [
        {}, {"Pair": [1], "Alone": [1]}, {"Pair": [1]}, {"Pair": 3}, {"dict": [[1], []]}, {"dict": 3}, {"dict": [[1]]},
        {"frozenset": [{"list": []}]}, {"dict": [[{"list": []}], [1]]}, {"list": None},
    ],
)  # fmt: skip
def test_another_form_is_refused_with_one_kind_of_error(plain: Any) -> None:
    with pytest.raises(WireError):
        PAIRS.made(plain)


def test_a_tower_of_arrays_is_refused() -> None:
    tower: Any = 1
    for _ in range(100_000):
        tower = [tower]
    with pytest.raises(WireError):
        PAIRS.made(tower)
    while isinstance(tower, list):  # or freeing it would recurse as deeply
        tower = tower.pop()


def test_what_a_class_refuses_is_refused() -> None:
    plain = WIRE.plain(PlanOptions())
    plain["PlanOptions"][4] = "nowhere"
    with pytest.raises(WireError, match="there is no region"):
        WIRE.made(plain)
