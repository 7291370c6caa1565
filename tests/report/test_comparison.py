"""The comparison as table, CSV and picture."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from pooch.api.options import PlanOptions
from pooch.measure.comparison import ComparisonRow, Measured, compare
from pooch.report.pareto import draw_pareto
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
    (axes,) = draw_pareto(rows, "toy").axes
    fitting = {row.policy for row in rows if row.plan is not None}
    assert 0 < len(fitting) < len(POLICIES)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {name for name in lines if not name.startswith("_")} == fitting | {"lower bound"}
    assert len([name for name in lines if name.startswith("_")]) == 2  # budgets
    assert all(lost >= -1e-7 for lost in lines["lower bound"].get_ydata())
    for policy in fitting:
        plans = [row.plan for row in rows if row.policy == policy and row.plan is not None]
        peaks = sorted(plan.predicted_peak_bytes for plan in plans)
        assert list(lines[policy].get_xdata()) == pytest.approx([peak_bytes / 2**20 for peak_bytes in peaks])
        slowest = max(plan.predicted_step_ms / plan.in_core_step_ms for plan in plans)
        assert max(lines[policy].get_ydata()) == pytest.approx((slowest - 1) * 100)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == fitting | {"lower bound"}
    missing = axes.get_legend().get_title().get_text()
    assert all(policy in missing for policy in set(POLICIES) - fitting)


def test_a_picture_of_nothing_is_drawn_too() -> None:
    (axes,) = draw_pareto(compare(blocks(2), ["1%"], policies=["keep_all"]), "toy").axes
    assert "keep_all" in axes.get_legend().get_title().get_text()
