"""The papers' figures and the experiments' rows fit together."""

from __future__ import annotations

import pytest

from pooch.planner import policy_names
from pooch.published.experiments import EXPERIMENTS
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
