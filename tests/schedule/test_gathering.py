"""Replays that read parameters which FSDP gathers: only inside of the windows of their unit, whatever is decided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.errors import FileFormatError, InvalidSchedule
from pooch.ir import Choice, GatheredUnit, Profile
from pooch.ir.executable import check_plan
from pooch.schedule import lower, verify
from tests import toys

PARAMETER, FIRST, SECOND = 1, 2, 3
DECIDED: dict[int, Choice] = {FIRST: "recompute", SECOND: "recompute"}


def step(*windows: tuple[int, int]) -> Profile:
    """Ops 0 and 1 make values 2 and 3, the first with a gathered parameter; slots 5 and 6 read values 3 and 2."""
    told = toys.ToyStep()
    told.external(8)
    told.parameter(8)
    told.op([0, PARAMETER], saves=[0])
    told.op([FIRST], saves=[FIRST])
    told.op([SECOND], saves=[SECOND])
    told.op([4])
    profile = told.build()
    assert [(slot, ids) for slot, ids in profile.anchors] == [(5, (SECOND,)), (6, (FIRST,))]
    values = tuple(replace(v, role="transient") if v.id == PARAMETER else v for v in profile.values)
    return replace(profile, values=values, gathered=(GatheredUnit("block", (PARAMETER,), windows),))


def test_a_value_is_recomputed_where_its_parameters_are_there_whenever_it_may_be_due() -> None:
    dataflow = Dataflow(step((5, 6)))
    assert dataflow.refusal(FIRST) is None
    assert dataflow.recipe(FIRST).gathered == (PARAMETER,)
    assert dataflow.from_gathered == {FIRST, SECOND}
    schedule = lower(dataflow, DECIDED, 1)
    assert [(a.slot, a.target) for a in schedule.actions if a.kind == "replay"] == [(5, 0), (5, 1)]
    verify(dataflow, schedule, DECIDED, None)


@pytest.mark.parametrize("windows", [[], [(5, 5)], [(7, 8)]])
def test_a_value_whose_parameters_are_away_is_not_recomputed(windows: list[tuple[int, int]]) -> None:
    refusal = Dataflow(step(*windows)).refusal(FIRST)
    assert refusal == "it reads a parameter that FSDP gathers for unit block, which may be gone by then"


def test_a_value_that_a_replay_may_need_sooner_is_not_recomputed() -> None:
    """In slot 6 it could be, but the one that is made from it is due in slot 5."""
    dataflow = Dataflow(step((6, 6)))
    assert dataflow.refusal(FIRST) is not None
    assert dataflow.refusal(SECOND) is None


def test_a_parameter_that_was_not_gathered_again_is_read_by_no_replay() -> None:
    dataflow = Dataflow(replace(step((5, 6)), gathered=()))
    assert dataflow.refusal(FIRST) is not None


def test_the_verifier_refuses_a_replay_outside_of_the_windows() -> None:
    schedule = lower(Dataflow(step((5, 6))), DECIDED, 1)
    with pytest.raises(InvalidSchedule, match="slot 5: replay of op 0 reads value 1, which FSDP has not gathered"):
        verify(Dataflow(step((6, 6))), schedule, DECIDED, None)


def test_replays_that_nobody_planned_read_no_gathered_parameters() -> None:
    assert FIRST not in Dataflow(step((5, 6))).saved_recipes
    assert SECOND in Dataflow(step((5, 6))).saved_recipes


def test_a_plan_names_the_gathered_parameters_that_it_reads() -> None:
    plan = plan_from_decisions(step((5, 6)), DECIDED, region="step")
    assert (plan.gathered, plan.from_gathered) == ((PARAMETER,), (FIRST, SECOND))
    assert check_plan(plan) is None
    assert "is said to be gathered" in str(check_plan(replace(plan, gathered=(FIRST,))))
    assert "is not recomputed" in str(check_plan(replace(plan, from_gathered=(PARAMETER,))))


def test_profiles_with_units_are_checked_and_those_without_load(tmp_path: Path) -> None:
    path, profile = tmp_path / "p.json", step((5, 6))
    profile.save(path)
    assert Profile.load(path) == profile
    older = json.loads(path.read_text())
    del older["gathered"]
    path.write_text(json.dumps(older))
    assert Profile.load(path) == replace(profile, gathered=())


@pytest.mark.parametrize(
    ("unit", "fault"),
    [
        (GatheredUnit("", (FIRST,), ()), "value 2 of a unit is not gathered in the step"),
        (GatheredUnit("", (99,), ()), "value 99 of a unit is not gathered in the step"),
        (GatheredUnit("", (PARAMETER, PARAMETER), ()), "a gathered parameter belongs to two units"),
        (GatheredUnit("a", (PARAMETER,), ((2, 5),)), "a window of unit 'a' is outside the backward pass"),
        (GatheredUnit("a", (PARAMETER,), ((5, 99),)), "a window of unit 'a' is outside the backward pass"),
        (GatheredUnit("a", (PARAMETER,), ((6, 5),)), "a window of unit 'a' ends before it begins"),
        (GatheredUnit("a", (PARAMETER,), ((5, 6), (6, 7))), "the windows of unit 'a' are not in ascending order"),
    ],
)
def test_units_that_cannot_be(unit: GatheredUnit, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    replace(step((5, 6)), gathered=(unit,)).save(path)
    with pytest.raises(FileFormatError, match=fault):
        Profile.load(path)
