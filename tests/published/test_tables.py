"""Tables of published experiments: the paper's figure beside ours, marked as modelled or as measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import page
from pooch.published.claims import verdicts
from pooch.published.experiments import EXPERIMENTS, find_experiment
from pooch.published.recording import Recording
from pooch.published.rows import Answer
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
