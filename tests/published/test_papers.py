"""The papers' figures and the experiments' rows fit together."""

from __future__ import annotations

from typing import Any

import pytest

from pooch.errors import FileFormatError
from pooch.ground.reading import packaged_tables
from pooch.planner import policy_names
from pooch.published import experiments
from pooch.published.experiments import EXPERIMENTS, read_experiment
from pooch.published.methods import find_method
from pooch.published.papers import PublishedFigure, published_figures
from pooch.published.rows import Experiment
from pooch.workloads import built_in_workloads, workload_growth

ALL = tuple(EXPERIMENTS.values())
NAMES = list(EXPERIMENTS)


@pytest.mark.parametrize("figure", published_figures(), ids=lambda figure: f"{figure.experiment} {figure.row}")
def test_every_figure_stands_beside_a_row_that_asks_its_method(figure: PublishedFigure) -> None:
    rows = {row.key: row for row in EXPERIMENTS[figure.experiment].rows}
    assert figure.method in rows[figure.row].methods
    assert figure.known in ("read", "abstract", "recalled")
    assert figure.source
    assert figure.value > 0


@pytest.mark.parametrize("experiment", ALL, ids=NAMES)
def test_rows_are_told_apart_and_ask_what_there_is(experiment: Experiment) -> None:
    rows = (*experiment.rows, *experiment.measured)
    assert len({row.key for row in rows}) == len(rows)
    assert any(row.quick for row in experiment.rows)
    assert experiment.measured or experiment.name == "policies"
    for row in rows:
        assert "ilp" in row.methods
        assert all(find_method(method).policy in policy_names() for method in row.methods)
        assert row.workload.partition("@")[0] in built_in_workloads()
        if "@" in row.workload:
            built_in_workloads()[row.workload.partition("@")[0]].preset(row.workload.partition("@")[2])
        if row.question == "largest":
            assert workload_growth(row.workload, row.grow).setting == row.grow
            assert not row.budget.endswith("%")
        assert row.is_measured == (row in experiment.measured)


def test_every_policy_answers_somewhere() -> None:
    answering = {method for each in ALL for row in each.rows for method in row.methods}
    assert {*policy_names()} <= answering
    assert {*EXPERIMENTS["policies"].rows[0].methods} == {*policy_names()} - {"keep_all"}


@pytest.mark.parametrize("experiment", ALL, ids=NAMES)
def test_claims_are_about_rows(experiment: Experiment) -> None:
    assert {claim.row for claim in experiment.claims} <= {row.key for row in experiment.rows}


def test_multiples_are_read_off_the_figures() -> None:
    by_row = {(each.experiment, each.row): each for each in published_figures()}
    assert by_row["meng", "nmt-400"].multiple == 30
    assert by_row["meng", "nmt-400"].text == "2 -> 60 (30.00x)"
    assert by_row["tflms", "resnet50-batch"].text == "4.7x"
    assert by_row["pooch", "resnet50-640-pcie"].text == "+38%"
    assert by_row["meng", "resnet1001-peak"].text == "5979 MB"
    assert by_row["unet3d", "unet3d-192-residual-16"].text == "-17.1%"


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"about": None}, "about: input should be a valid string"),
    ({"rows": [{"key": "a"}]}, "rows.0.title: field required"),
    ({"rows": [{"key": "a", "title": "A", "colour": "red"}]}, "rows.0.colour: unexpected keyword argument"),
    ({"every_row": {"question": "fastest"}}, "rows.0.question: input should be 'slowdown' or 'largest'"),
    ({"every_row": {"methods": ["os.system"]}}, "'os.system' is unknown"),
    ({"every_row": {"workload": "mine.py:make"}}, "'mine.py:make' is unknown"),
    ({"claims": [{"row": "gone", "quantity": "slowdown", "limit": 0.1}]}, "'gone' is unknown"),
    (
        {"claims": [{"row": "resnet50-640-pcie", "quantity": "multiple"}]},
        "claims.0.limit: input should be a valid number",
    ),
]


@pytest.mark.parametrize(("changed", "complaint"), FAULTS, ids=[complaint for _, complaint in FAULTS])
def test_a_fault_in_the_file_of_an_experiment_is_told_in_one_line(changed: dict[str, Any], complaint: str) -> None:
    tables = packaged_tables(experiments.__name__, "policies.toml")
    given = {**tables, **changed}
    if "every_row" in changed:
        given["every_row"] = tables["every_row"] | changed["every_row"]
        given["rows"] = [{key: row[key] for key in ("key", "title")} for row in tables["rows"]]
    with pytest.raises(FileFormatError) as raised:
        read_experiment("policies", given)
    assert str(raised.value).startswith("policies.toml: ")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_rows_of_one_name_are_refused() -> None:
    tables = packaged_tables(experiments.__name__, "policies.toml")
    with pytest.raises(FileFormatError, match="'resnet50-640-nvlink' is unknown, or there twice"):
        read_experiment("policies", {**tables, "rows": [*tables["rows"], tables["rows"][0]]})
