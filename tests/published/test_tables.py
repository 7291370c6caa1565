"""Tables of published experiments: the paper's figure beside ours, marked as modelled or as measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results import page
from pooch.published.claims import verdicts
from pooch.published.experiments import EXPERIMENTS, find_experiment
from pooch.published.recording import Recording
from pooch.published.rows import Answer, Experiment
from pooch.published.running import Reproduced
from pooch.published.tables import reproduction_record, reproduction_tables


def answer(method: str, **known: object) -> Answer:
    head = {"row": "resnet50-640-nvlink", "device": "a V100", "modelled": True, "budget_bytes": 15 * 2**30}
    in_core = {"in_core_step_ms": 100.0, "in_core_peak_bytes": 50 * 2**30}
    return Answer(**{**head, **in_core, "method": method, "fits": True, **known})  # type: ignore[arg-type]


@pytest.fixture
def reproduced() -> Reproduced:
    experiment = find_experiment("pooch")
    rows = tuple(row for row in experiment.rows if row.key == "resnet50-640-nvlink")
    measured = experiment.measured
    answers = (
        answer("superneurons", fits=False, needs_bytes=20 * 2**30),
        answer("pooch_2018", step_ms=112.0),
        answer("ilp", step_ms=103.0, lower_bound_ms=102.0),
        Answer(
            measured[0].key, "ilp", "this machine", False, 2**30, True, step_ms=110.0, in_core_step_ms=100.0,
            in_core_peak_bytes=2 * 2**30, measured_step_ms=240.0, measured_plain_step_ms=200.0,
            measured_peak_bytes=2**30 - 1,
        ),
    )  # fmt: skip
    return Reproduced(experiment, rows, measured, answers, verdicts(experiment, answers)[:1])


def test_a_row_has_the_papers_figure_and_every_methods(reproduced: Reproduced) -> None:
    simulated, measured, claims = reproduction_tables(reproduced)
    assert "modelled, not measured" in simulated.title
    cells = dict(zip(simulated.columns, simulated.rows[0], strict=True))
    assert cells["in-core"] == "50.00 GiB, 100.0 ms"
    assert cells["paper"] == "+28% [abstract]"
    assert cells["superneurons"] == "needs 20.00 GiB"
    assert cells["pooch_2018"] == "+12.0%"
    assert cells["ilp"] == "+3.0%"
    assert cells["lower bound"] == "+2.0%"
    assert cells["swap_all"] == "-"
    assert "measured here" in measured.title
    assert "paper" not in measured.columns
    assert "+20.0% (predicted +10.0%), 1024.00 MiB" in measured.rows[0]
    assert claims.rows == (("ResNet-50, batch 640, V100-NVLink", "at most 8% slower", "3.0%", "reached"),)


def test_a_measured_slowdown_shows_its_spread(reproduced: Reproduced) -> None:
    ratios = (1.10, 1.20, 1.30, 1.15, 1.90)
    answers = tuple(replace(each, measured_ratios=ratios if not each.modelled else ()) for each in reproduced.answers)
    _, measured, _ = reproduction_tables(replace(reproduced, answers=answers))
    expected = "+20.0% (half of the turns +15.0% to +30.0%; predicted +10.0%), 1024.00 MiB"
    assert expected in measured.rows[0]


def test_many_methods_are_lines_instead_of_columns(reproduced: Reproduced) -> None:
    policies = find_experiment("policies")
    rows = policies.rows[:2]
    answers = tuple(answer("ilp", row=row.key, step_ms=100.0 + place) for place, row in enumerate(rows))
    (table,) = reproduction_tables(Reproduced(policies, rows, (), answers, ()))
    assert table.columns == ("", rows[0].title, rows[1].title)
    assert ("ilp", "+0.0%", "+1.0%") in table.rows
    assert ("dtr", "-", "-") in table.rows


def test_an_overhead_of_nothing_saves_nothing(experiment: Experiment) -> None:
    row = experiment.rows[0]

    def saved(before_ms: float) -> str:
        answers = (
            answer("tflms", row=row.key, step_ms=before_ms),
            answer("tflms_tuned", row=row.key, step_ms=100.0),
        )
        table, *_ = reproduction_tables(Reproduced(experiment, (row,), (), answers, ()))
        return dict(zip(table.columns, table.rows[0], strict=True))["saved by tflms_tuned"]

    assert saved(100.9) == "-"
    assert saved(102.0) == "100.0%"


def test_hours_of_a_training_follow_from_its_steps(experiment: Experiment) -> None:
    answers = (answer("ilp", row="four", step_ms=200.0),)
    tables = reproduction_tables(Reproduced(experiment, experiment.rows[:1], (), answers, ()))
    (hours,) = [table for table in tables if "Hours" in table.title]
    assert hours.rows[0][3:] == ("200.0 h (2.00x)", "2 h (2.00x) [abstract]")
    assert hours.rows[1][3:] == ("100.0 h (1.00x)", "1 h (1.00x)")


def test_the_record_is_json(reproduced: Reproduced) -> None:
    record = json.loads(json.dumps(reproduction_record(reproduced), allow_nan=False))
    assert [each["method"] for each in record["answers"]] == ["superneurons", "pooch_2018", "ilp", "ilp"]
    assert record["papers"][0]["value"] == 0.28
    assert record["claims"][0]["reached"] is True


def test_the_page_is_made_of_what_is_recorded(reproduced: Reproduced, tmp_path: Path) -> None:
    recording = Recording("pooch", tmp_path)
    rows = {row.key: row for row in (*reproduced.simulated, *reproduced.measured)}
    for each in reproduced.answers:
        recording.add(rows[each.row], each)
    text = page(tmp_path)
    assert "## PoocH: slowdown out of core (Ito et al. 2019)" in text
    assert "| +28% [abstract] |" in text
    assert "AlexNet, batch" not in text
    others = [experiment.title for name, experiment in EXPERIMENTS.items() if name != "pooch"]
    assert not any(title in text for title in others)


def test_a_claim_that_is_only_reached_in_slices_says_so() -> None:
    experiment = find_experiment("meng")
    head = {"row": "nmt-100", "device": "an M40", "modelled": True, "budget_bytes": 11 * 2**30, "fits": True}
    whole = Answer(**head, method="ilp", largest=900, in_core_largest=170)  # type: ignore[arg-type]
    sliced = Answer(**head, method="ilp_loss_in_slices", largest=1700, in_core_largest=170)  # type: ignore[arg-type]

    def told(*answers: Answer) -> tuple[bool | None, str]:
        (verdict,) = (each for each in verdicts(experiment, answers) if each.claim.row == "nmt-100")
        return verdict.reached, verdict.result

    assert told(whole)[0] is False
    reached, text = told(whole, sliced)
    assert reached
    assert text.startswith("10.00 times with the loss in slices of rows; with it whole, 5.29 times: ")
    assert told(replace(whole, largest=1200), sliced) == (True, "7.06 times")
    assert told(whole, replace(sliced, largest=1000))[0] is False
