"""The comparison as table, CSV and picture."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from rich.console import Console

from pooch.api.measure.comparison import ComparisonRow, Measured, compare
from pooch.api.options import PlanOptions
from pooch.ground.colours import IN_CORE, PLANNED
from pooch.report.pareto import draw_pareto, spread
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


def names_in(axes: Axes) -> list[str]:
    """The policies whose names stand beside the lines."""
    return [text.get_text() for text in axes.texts if isinstance(text, Annotation)]


def remarks_of(figure: Figure) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def test_the_picture_has_a_line_per_policy_that_fits_and_names_the_others(rows: tuple[ComparisonRow, ...]) -> None:
    figure = draw_pareto(rows, "toy", show_all=True)
    (axes,) = figure.axes
    fitting = {row.policy for row in rows if row.plan is not None}
    assert 0 < len(fitting) < len(POLICIES)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {name for name in lines if not name.startswith("_")} == fitting | {"lower bound"}
    assert all(lost >= -1e-7 for lost in lines["lower bound"].get_ydata())
    for policy in fitting:
        plans = [row.plan for row in rows if row.policy == policy and row.plan is not None]
        peaks = sorted(plan.predicted_peak_bytes for plan in plans)
        assert list(lines[policy].get_xdata()) == pytest.approx([peak_bytes / 2**20 for peak_bytes in peaks])
        slowest = max(plan.predicted_step_ms / plan.in_core_step_ms for plan in plans)
        assert max(lines[policy].get_ydata()) == pytest.approx((slowest - 1) * 100)
    assert sorted(names_in(axes)) == sorted(fitting)
    assert remarks_of(figure).startswith("fits nowhere: ")
    assert all(policy in remarks_of(figure) for policy in set(POLICIES) - fitting)


def test_only_ours_are_in_colour_and_each_family_has_its_mark(rows: tuple[ComparisonRow, ...]) -> None:
    (axes,) = draw_pareto(rows, "toy", show_all=True).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["ilp"].get_color() == PLANNED
    assert lines["swap_all"].get_color() == lines["superneurons"].get_color() == IN_CORE
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "swap only" in told
    assert told[-1] == "lower bound of the integer program"


def test_what_others_beat_is_drawn_only_if_it_is_asked_for(rows: tuple[ComparisonRow, ...]) -> None:
    best = next(row for row in rows if row.policy == "ilp" and row.plan is not None)
    assert best.plan is not None
    worse = replace(
        best.plan,
        predicted_peak_bytes=best.plan.predicted_peak_bytes + 1,
        predicted_step_ms=best.plan.predicted_step_ms + 1,
    )
    compared = [best, replace(best, policy="beaten", plan=worse), replace(best, policy="level")]
    figure = draw_pareto(compared, "toy")
    assert sorted(names_in(figure.axes[0])) == ["ilp", "level"]
    assert "(--all draws them): beaten" in remarks_of(figure)
    assert "the best of the others (level)" in figure.axes[0].get_title(loc="left")
    everything = draw_pareto(compared, "toy", show_all=True)
    assert sorted(names_in(everything.axes[0])) == ["beaten", "ilp", "level"]
    assert not remarks_of(everything)


def test_the_list_of_what_fits_nowhere_is_wrapped() -> None:
    rows = [ComparisonRow(1000, f"policy_number_{number}", None, minimum_bytes=2000) for number in range(40)]
    lines = draw_pareto(rows, "toy").get_supxlabel().splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize(
    ("heights", "apart"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.0, 0.01, 0.15], [0.0, 0.1, 0.2]),
        ([], []),
    ],
)
def test_names_are_moved_apart(heights: list[float], apart: list[float]) -> None:
    assert spread(heights, 0.1) == pytest.approx(apart)


def test_a_picture_of_nothing_is_drawn_too() -> None:
    figure = draw_pareto(compare(blocks(2), ["1%"], policies=["keep_all"]), "toy")
    assert "keep_all" in remarks_of(figure)
    (axes,) = figure.axes
    assert axes.get_xlabel().endswith("dashed: budgets"), "shares are of what is not known"
    assert "no policy has a plan" in axes.get_title(loc="left")
