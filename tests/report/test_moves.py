"""What people see of a plan in which also leaves what outlives the step."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import pooch
from pooch.cli import main
from pooch.ir import Plan, Profile
from pooch.report.figures import draw_plan
from pooch.report.page.writing import write_report
from pooch.report.summaries import plan_record
from pooch.report.tables import moves_table, plan_table, profile_table
from pooch.report.trace import trace_text
from tests.persistent_toys import layered, with_tensors
from tests.toys import chain

MIB = 2**20


@pytest.fixture(scope="module")
def profile() -> Profile:
    return with_tensors(chain(4, size_bytes=MIB), layered(4, size_bytes=4 * MIB))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    found = pooch.plan(profile, profile.persistent_bytes * 3 // 4, region="step", moves="all", explain=False)
    assert found.persistent is not None
    return found


def text(*shown: object) -> str:
    console = Console(file=StringIO(), width=140)
    console.print(*shown)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_tables_tell_what_leaves_by_kind(profile: Profile, plan: Plan) -> None:
    assert plan.persistent is not None
    shown = text(moves_table(plan.persistent))
    assert "the optimizer's state" in shown
    in_short = text(plan_table(plan))
    assert "also leaves" in in_short
    assert "copied out and" in in_short
    assert "could leave (--moves all)" in text(profile_table(profile))


def test_a_record_has_the_figures(plan: Plan) -> None:
    record = json.loads(json.dumps(plan_record(plan)))["persistent"]
    assert plan.persistent is not None
    assert sum(each["copied_in_bytes"] for each in record["kinds"].values()) == plan.persistent.copied_in_bytes
    assert sum(each["copied_out_bytes"] for each in record["kinds"].values()) == plan.persistent.copied_out_bytes
    assert record["optimizer_ms"] == plan.persistent.optimizer_ms


def test_the_picture_shows_who_is_there(profile: Profile, plan: Plan) -> None:
    memory, streams = draw_plan(profile, plan).axes
    names = memory.get_legend_handles_labels()[1]
    assert {"parameters", "gradients", "the optimizer's state"} <= set(names)
    assert "move" in streams.get_legend_handles_labels()[1]
    staying = pooch.plan(profile, profile.peak_bytes, region="step")
    assert "parameters" not in draw_plan(profile, staying).axes[0].get_legend_handles_labels()[1]


def test_the_trace_names_what_moves(profile: Profile, plan: Plan) -> None:
    events = json.loads(trace_text(profile, pooch.simulate(profile, plan)))["traceEvents"]
    moved = [event for event in events if event.get("cat") == "move"]
    assert {event["name"].split()[0] for event in moved} >= {"parameter", "state"}
    assert all(event["args"]["size_bytes"] for event in moved)
    assert any(event["name"] == "wait for what outlives the step" for event in events)


def test_the_command_plans_and_shows_it(profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile.save(tmp_path / "profile.json")
    command = ["plan", str(tmp_path / "profile.json"), "--budget", str(profile.persistent_bytes * 3 // 4)]
    assert main([*command, "--region", "step"]) == 3
    capsys.readouterr()
    assert main([*command, "--region", "step", "--moves", "all", "--output", str(tmp_path / "plan.json")]) == 0
    assert "what outlives the step" in capsys.readouterr().out
    shown = ["show", str(tmp_path / "plan.json"), "--profile", str(tmp_path / "profile.json")]
    assert main([*shown, "--plot", str(tmp_path / "plan.png")]) == 0
    assert "what outlives the step" in capsys.readouterr().out


def test_on_a_page_it_leaves_under_other_budgets_as_well(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    found = write_report(profile, plan, tmp_path / "page.html", budgets=("min",))
    smallest = pooch.plan(profile, "min", region="step", moves="all", explain=False)
    assert [each.budget_bytes for each in found.plans] == [smallest.budget_bytes, plan.budget_bytes]
    assert all(each.persistent is not None for each in found.plans)
