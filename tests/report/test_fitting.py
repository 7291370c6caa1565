"""Tables at the widths of real terminals: no line is wider, no cell is folded, and what is left out is named."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

import pooch
from pooch.api.batch_search.results import MaxBatch, MeasuredSize, SizePoint, Sizes
from pooch.api.measure.comparison import ComparisonRow, Measured
from pooch.devices import known_devices
from pooch.ground.colours import CHOICES
from pooch.ir import Plan, Profile
from pooch.ir.layout import StepLayout
from pooch.published.experiments import EXPERIMENTS
from pooch.published.running import reproduce
from pooch.published.tables import reproduction_tables
from pooch.report import tables
from pooch.report.devices import catalogue_tables
from pooch.report.fitting import Column, FittedTable, shortened
from pooch.report.growing import max_batch_tables
from pooch.report.training import training_tables
from pooch.workloads import built_in_workloads
from tests.report.test_tables import REPORT
from tests.toys import blocks

ROOT = Path(__file__).parents[2]
WIDTHS = (80, 100, 140)


def lines_of(shown: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def words_of(lines: Iterable[str]) -> set[str]:
    return {word.strip("();,") for line in lines for word in line.split() if not set(word) <= set("─")}


def check(shown: RenderableType, width: int) -> None:
    """No line is wider than the terminal, and every word is a word of the whole table, or shortened in the middle."""
    lines = lines_of(shown, width)
    assert max(map(cell_len, lines)) <= width
    whole = words_of(lines_of(shown, 5000))
    parts = {part for word in whole if "/" in word for part in addresses(word)}
    hint = {word.strip(",") for line in lines if line.startswith("not shown in") for word in line.split()}
    folded = {word for word in words_of(lines) - whole - parts if "…" not in word and word.strip(",") not in hint}
    assert not folded
    assert all(len(word) >= 8 for word in words_of(lines) if "…" in word), "enough is left to recognize it"


def addresses(word: str) -> Iterable[str]:
    """What an address may be parted into: after strokes."""
    cuts = [0, *(place + 1 for place, letter in enumerate(word) if letter == "/"), len(word)]
    return [word[first:last] for first in cuts for last in cuts if first < last]


@pytest.fixture(scope="module", params=sorted(ROOT.glob("profiles/*.json")), ids=lambda path: path.stem)
def stored(request: pytest.FixtureRequest) -> tuple[Profile, Plan]:
    """A stored profile, and a plan with all that a table can show: other choices that were simulated, and an arena."""
    profile = Profile.load(request.param)
    plan = pooch.plan(profile, "90%", policy="swap_all")
    changed = {"keep_change_ms": float("inf"), "swap_change_ms": 1234.5, "recompute_change_ms": -0.25}
    choices = tuple(replace(choice, **changed) for choice in plan.choices)
    layout = StepLayout(policy="ours", arena_bytes=2**31, bound_bytes=2**31, outside_bytes=2**29, blocks=())
    return profile, replace(plan, choices=choices, layout=layout)


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_stored_profiles_and_plans_fit(stored: tuple[Profile, Plan], width: int) -> None:
    profile, plan = stored
    shown = [tables.profile_table(profile), tables.plan_table(plan), tables.choices_table(plan)]
    shown += [tables.decisions_table(plan, longest=100), tables.decisions_table(plan, reasons=True)]
    for depth in (2, None):
        shown += [tables.layers_table(profile, depth=depth), tables.layers_table(profile, plan, depth=depth)]
    for each in shown:
        check(each, width)
    (line,) = [line for line in lines_of(shown[3], 80) if line.startswith("not shown")]
    assert line == "not shown in 80 columns: if kept, if swapped, if recomputed"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_and_its_measurements_fit(width: int) -> None:
    profile = blocks(4)
    plan = pooch.plan(profile, "90%", policy="swap_all")
    measured = Measured(peak_bytes=2**33 - 1, reserved_bytes=2**33, step_ms=123456.7, plain_step_ms=120000.1)
    names = ("ilp", "superneurons", "swap_all_no_scheduling", "tflms(n_tensors=4, exclude=layer3.5.conv2)")
    rows = [ComparisonRow(2**33, name, plan, measured=measured) for name in names]
    rows.append(ComparisonRow(2**33, "keep_all", None, minimum_bytes=2**34 - 1))
    check(tables.comparison_table(rows), width)
    check(tables.measured_table(rows), width)
    assert all(name in "\n".join(lines_of(tables.comparison_table(rows), width)) for name in names[:3])


@pytest.mark.parametrize("width", WIDTHS)
def test_devices_and_a_training_fit(width: int) -> None:
    for each in (*catalogue_tables(known_devices().values()), *training_tables(REPORT)):
        check(each, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_sizes_and_workloads_fit(width: int) -> None:
    profile = blocks(4)
    plan = pooch.plan(profile, "100%", policy="keep_all")
    gib = 2**30 - 1
    curve = tuple(SizePoint(size, size, 999 * gib, 123456.7, 999 * gib, 123456.7, 1.0, plan) for size in (1, 12345))
    measured = tuple(MeasuredSize(size, size, size > 1, gib, 9e5, gib, 9e5, reserved_bytes=gib) for size in (1, 12345))
    found = MaxBatch(
        "toy", "ilp", 2**40, profile.device, "fake", Sizes(), curve[1], curve[0], (0, 0), curve, 2, 2, measured
    )
    workloads = {entry.name: entry.summary for entry in built_in_workloads().values()}
    for each in (*max_batch_tables(found), tables.facts_table("built-in workloads", workloads)):
        check(each, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_published_experiments_fit_and_lose_nothing(name: str, width: int) -> None:
    recorded = reproduce(EXPERIMENTS[name], folder=ROOT / "benchmarks" / "results" / "reproduce", only_recorded=True)
    for table in reproduction_tables(recorded):
        check(table.rich(), width)
        assert not [line for line in lines_of(table.rich(), width) if line.startswith("not shown")]


def test_columns_go_in_their_order_and_the_rest_goes_on_below() -> None:
    figures = [Column("first", drop=1), Column("second", drop=2), Column("stays")]
    table = FittedTable("t", [Column("name", "word"), *figures])
    table.add_row("row", *(digit * 10 for digit in "123"))
    assert {
        width: "".join(digit for digit in "123" if digit * 10 in "".join(lines_of(table, width)))
        for width in (42, 41, 30, 29)
    } == {42: "123", 41: "13", 30: "13", 29: "3"}
    stiff = FittedTable("t", [Column("name", "word"), *(Column(f"column{number}") for number in range(4))])
    stiff.add_row("row", *("9" * 9 for _ in range(4)))
    lines = lines_of(stiff, 30)
    assert "".join(lines).count("9" * 9) == 4
    assert sum(line.startswith(" row") for line in lines) == 2


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("encoder.layer1.conv2", 20, "encoder.layer1.conv2"),
        ("encoder.layer1.conv2", 13, "encode…conv2"),
        ("漢字漢字漢字", 7, "漢…字"),
    ],
)
def test_labels_are_shortened_in_the_middle(text: str, width: int, short: str) -> None:
    assert shortened(text, width) == short


def test_a_label_cannot_break_out_of_its_row() -> None:
    table = FittedTable("t", [Column("name", "label"), Column("size")])
    table.add_row("two\nlines\x1b[2J", "1")
    assert [line for line in lines_of(table, 40) if "two" in line] == [" two lines\\x1b[2J     1"]


def test_choices_have_the_colours_of_the_pictures() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    plan = pooch.plan(blocks(2), "100%", policy="keep_all")
    console.print(tables.choices_table(plan))
    for choice in ("keep", "swap", "recompute"):
        red, green, blue = (int(CHOICES[choice][place : place + 2], 16) for place in (1, 3, 5))
        assert f"38;2;{red};{green};{blue}m{choice}" in console.file.getvalue()  # type: ignore[attr-defined]
