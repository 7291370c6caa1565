"""The comparison as table, CSV and picture."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from pooch.api.options import PlanOptions
from pooch.measure.comparison import ComparisonRow, Measured, compare
from pooch.report.pareto import draw_pareto, pareto_picture
from pooch.report.summaries import byte_shares, comparison_csv
from pooch.report.tables import comparison_table, measured_table
from tests.toys import FAST_LINK, blocks

POLICIES = ("ilp", "keep_all", "swap_all", "superneurons")


@pytest.fixture(scope="module")
def rows() -> tuple[ComparisonRow, ...]:
    return compare(blocks(4, link=FAST_LINK), ["80%", "60%"], PlanOptions(time_limit_s=5), policies=POLICIES)


def text_of(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_shares_of_bytes_are_those_of_the_decisions(rows: tuple[ComparisonRow, ...]) -> None:
    plan = next(row.plan for row in rows if row.policy == "superneurons" and row.plan)
    shares = byte_shares(plan)
    assert sum(shares.values()) == pytest.approx(1.0)
    swapped = sum(each.size_bytes for each in plan.choices if each.choice == "swap")
    assert shares["swap"] == pytest.approx(swapped / sum(each.size_bytes for each in plan.choices))


def test_csv_has_a_line_per_cell_and_the_same_columns_where_nothing_fits(rows: tuple[ComparisonRow, ...]) -> None:
    lines = list(csv.DictReader(io.StringIO(comparison_csv(rows))))
    assert [(line["policy"], int(line["budget_bytes"])) for line in lines] == [(r.policy, r.budget_bytes) for r in rows]
    kept = next(line for line in lines if line["policy"] == "keep_all")
    assert (kept["feasible"], kept["predicted_step_ms"]) == ("False", "")
    planned = next(line for line in lines if line["policy"] == "swap_all")
    assert float(planned["slowdown"]) >= 1.0
    assert int(planned["host_bytes"]) > 0


def test_the_table_says_what_everything_costs_without_cutting_words(rows: tuple[ComparisonRow, ...]) -> None:
    text = text_of(comparison_table(rows))
    for told in ("superneurons", "needs", "tier", "planned", "k/s/r"):
        assert told in text
    assert "…" not in text


def test_measured_columns_stand_beside_the_promise(rows: tuple[ComparisonRow, ...]) -> None:
    plan = rows[0].plan
    assert plan is not None
    measured = ComparisonRow(rows[0].budget_bytes, "ilp", plan, measured=Measured(2**20, 150.0, 100.0))
    text = text_of(measured_table([measured, rows[1]]))
    for told in ("1.500", "1.00 MiB", "100.0 ms"):
        assert told in text
    assert "keep_all" not in text, "what has no plan was not measured"
    assert "measured_slowdown" in comparison_csv([measured])


def test_the_picture_has_a_line_per_policy_that_fits_and_names_the_others(rows: tuple[ComparisonRow, ...]) -> None:
    picture = pareto_picture(rows, "toy")
    names = {series.policy for series in picture.series}
    assert names | set(picture.missing) == set(POLICIES)
    assert "keep_all" in picture.missing
    assert len(picture.budgets_bytes) == 2
    assert all(bound >= 1 - 1e-9 for _, bound in picture.bounds)
    (axes,) = draw_pareto(picture).axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == names | {"lower bound"}
    assert "keep_all" in axes.get_legend().get_title().get_text()


def test_a_picture_of_nothing_is_drawn_too() -> None:
    nothing = compare(blocks(2), ["1%"], policies=["keep_all"])
    assert pareto_picture(nothing, "toy").series == ()
    draw_pareto(pareto_picture(nothing, "toy"))
