"""Answers to rows: what the stages say when they are asked directly, once each, and recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pooch.api.planning import plan
from pooch.errors import FileFormatError, UsageError
from pooch.ir import Profile
from pooch.published.claims import claim_text
from pooch.published.methods import find_method
from pooch.published.rows import Answer, Experiment
from pooch.published.running import Reproduced, reproduce
from tests.published.conftest import LINK, Toys
from tests.rescaling import rescale


def by_method(reproduced: Reproduced, row: str) -> dict[str, Answer]:
    return {answer.method: answer for answer in reproduced.answers if answer.row == row}


def four(toys: Toys) -> Profile:
    return rescale(toys.toy, 4, 1, LINK, 2**30, "a toy")


def test_a_slowdown_is_that_of_the_plan(experiment: Experiment, toys: Toys) -> None:
    answers = by_method(reproduce(experiment, rows=["four"]), "four")
    for method, answer in answers.items():
        if method == "keep_all":
            assert not answer.fits
            assert answer.needs_bytes == four(toys).peak_bytes
            continue
        made = plan(four(toys), "60%", policy=method, region="step")
        assert answer.slowdown == pytest.approx(made.predicted_step_ms / made.in_core_step_ms - 1)
        assert answer.peak_bytes == made.predicted_peak_bytes <= answer.budget_bytes
        assert answer.modelled
    assert answers["ilp"].step_ms <= min(a.step_ms for a in answers.values() if a.step_ms)  # type: ignore[operator]
    assert answers["tflms_tuned"].step_ms <= answers["tflms"].step_ms  # type: ignore[operator]


def test_methods_of_a_row_share_its_profile(experiment: Experiment, toys: Toys) -> None:
    reproduce(experiment, rows=["four"])
    assert toys.asked == [("fake", 4)]


def test_the_largest_size_has_its_multiple_and_throughput(experiment: Experiment) -> None:
    answers = by_method(reproduce(experiment, rows=["many"]), "many")
    for answer in answers.values():
        assert answer.largest is not None
        assert answer.in_core_largest is not None
        assert answer.largest > answer.in_core_largest >= 20
        assert answer.multiple == answer.largest / answer.in_core_largest
        assert answer.relative_throughput == pytest.approx(answer.curve[-1][1] / answer.curve[0][1])
        assert answer.largest_at(0.0) == answer.largest
        assert answer.largest_at(1e9) is None
    assert answers["ilp"].largest >= answers["tflms"].largest  # type: ignore[operator]


def test_only_the_methods_that_are_asked_for_answer(experiment: Experiment, tmp_path: Path) -> None:
    reproduced = reproduce(experiment, rows=["four"], methods=["tflms*"], folder=tmp_path)
    assert list(by_method(reproduced, "four")) == ["tflms", "tflms_tuned"]
    more = reproduce(experiment, rows=["four"], methods=["ilp"], folder=tmp_path)
    assert list(by_method(more, "four")) == ["tflms", "tflms_tuned", "ilp"], "what is recorded stays"
    with pytest.raises(UsageError, match="no method of toys matches dtr: choose from keep_all, swap_all, tflms"):
        reproduce(experiment, methods=["dtr"])


def test_a_measured_slowdown_is_the_median_over_turns_and_has_a_spread() -> None:
    ratios = (1.30, 1.10, 1.20, 1.15, 1.90)
    measured = Answer("r", "ilp", "here", False, 1, True, measured_ratios=ratios, measured_step_ms=2.0)
    assert measured.measured_slowdown == pytest.approx(0.20)
    assert measured.measured_quartiles == (pytest.approx(0.15), pytest.approx(0.30))
    assert replace(measured, measured_ratios=()).measured_quartiles is None


def test_claims_are_told_reached_or_not(experiment: Experiment) -> None:
    verdicts = reproduce(experiment).verdicts
    told = {claim_text(verdict.claim): verdict.reached for verdict in verdicts}
    assert told == {
        "at most 5000% slower": True,
        "at most 0% slower": False,
        "at least 1.00 times the in-core size": True,
        "at least 1.00 times the in-core size with at least 1% of the in-core throughput": True,
        "at least 1e+06": False,
    }


def test_claims_about_rows_that_were_not_chosen_are_left_out(experiment: Experiment) -> None:
    reproduced = reproduce(experiment, quick=True)
    assert {row.key for row in reproduced.simulated} == {"four"}
    assert {verdict.claim.row for verdict in reproduced.verdicts} == {"four"}


def test_recorded_answers_are_not_asked_again(experiment: Experiment, toys: Toys, tmp_path: Path) -> None:
    first = reproduce(experiment, rows=["four"], folder=tmp_path)
    toys.asked.clear()
    again = reproduce(experiment, rows=["four"], folder=tmp_path)
    assert toys.asked == []
    assert again.answers == first.answers
    reproduce(experiment, rows=["four"], folder=tmp_path, again=True)
    assert toys.asked != []


def test_a_changed_question_is_asked_again(experiment: Experiment, toys: Toys, tmp_path: Path) -> None:
    first = reproduce(experiment, rows=["four"], folder=tmp_path)
    changed = replace(experiment, rows=(replace(experiment.rows[0], budget="70%"), *experiment.rows[1:]))
    toys.asked.clear()
    again = reproduce(changed, rows=["four"], folder=tmp_path)
    assert toys.asked == [("fake", 4)]
    assert [a.budget_bytes for a in again.answers] != [a.budget_bytes for a in first.answers]


def test_what_is_not_recorded_stays_open(experiment: Experiment, toys: Toys, tmp_path: Path) -> None:
    reproduce(experiment, rows=["four"], folder=tmp_path)
    toys.asked.clear()
    shown = reproduce(experiment, folder=tmp_path, only_recorded=True)
    assert toys.asked == []
    assert {answer.row for answer in shown.answers} == {"four"}
    assert {verdict.reached for verdict in shown.verdicts if verdict.claim.row != "four"} == {None}


@pytest.mark.parametrize("damage", ["", "{", '{"format": 1}', "[]"])
def test_a_damaged_record_is_told_in_one_line(experiment: Experiment, tmp_path: Path, damage: str) -> None:
    (tmp_path / "toys.json").write_text(damage)
    with pytest.raises(FileFormatError, match=r"toys\.json holds no recorded answers .*: delete it"):
        reproduce(experiment, folder=tmp_path)


def test_a_record_of_another_experiment_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    reproduce(experiment, rows=["four"], folder=tmp_path)
    document = json.loads((tmp_path / "toys.json").read_text())
    (tmp_path / "toys.json").write_text(json.dumps(document | {"experiment": "other"}))
    with pytest.raises(FileFormatError, match="answers of another kind"):
        reproduce(experiment, folder=tmp_path)


def test_a_pattern_that_fits_no_row_names_those_that_there_are(experiment: Experiment) -> None:
    with pytest.raises(UsageError, match="no row of toys matches five: choose from four, many"):
        reproduce(experiment, rows=["five"])


def test_the_program_without_swaps_inside_of_the_forward_pass_sees_no_looks(toys: Toys) -> None:
    watched = replace(toys.toy, values=tuple(replace(value, touches=()) for value in toys.toy.values))
    assert all(value.touches is None for value in find_method("ilp_backward_only").sees(watched).values)
    assert find_method("ilp").sees(watched) is watched
