"""The page's data: what it holds, how large it gets, and that no label can get out of it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import PlanMismatch, UsageError
from pooch.ir import Plan, Profile
from pooch.report.page import contents
from pooch.report.page.budgets import BudgetPlans, parse_budgets, plan_budgets
from pooch.report.page.contents import page_contents
from pooch.report.page.writing import json_for_html, write_report
from tests.cli.conftest import Command
from tests.toys import FAST_LINK, SLOW_LINK, blocks, some_decisions


@pytest.fixture
def profile() -> Profile:
    return blocks(6, size_bytes=2000, link=SLOW_LINK)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return pooch.plan(profile, "70%")


def contents_of(profile: Profile, plan: Plan) -> dict:
    return json.loads(json_for_html(page_contents(profile, BudgetPlans((plan,), 0, ()))))


def planned(profile: Profile, plan: Plan, budgets: object) -> BudgetPlans:
    return plan_budgets(profile, plan, budgets, host_budget=None, time_limit_s=30.0, progress=None)  # type: ignore[arg-type]


def test_a_count_of_budgets_is_spread_evenly_from_the_smallest_to_the_in_core_peak(
    profile: Profile, plan: Plan
) -> None:
    found = planned(profile, plan, 3)
    others = [each.budget_bytes for each in found.plans if each is not plan]
    smallest = pooch.smallest_budget(profile)
    assert others == [smallest, (smallest + profile.peak_bytes) // 2, profile.peak_bytes]
    assert found.plans[found.given] is plan
    assert all(each.policy == "ilp" and each.region == plan.region for each in found.plans)
    times = [each.predicted_step_ms for each in found.plans]
    assert times == sorted(times, reverse=True), "more memory is never slower"


def test_a_list_of_budgets_takes_what_plan_takes_and_the_given_one_once(profile: Profile, plan: Plan) -> None:
    found = planned(profile, plan, parse_budgets("70%, min,90%"))
    assert [each.budget_bytes for each in found.plans] == [
        pooch.smallest_budget(profile),
        plan.budget_bytes,
        int(0.9 * profile.peak_bytes),
    ]


def test_a_budget_that_has_no_plan_is_noted(profile: Profile, plan: Plan) -> None:
    found = planned(profile, plan, ("1%",))
    assert found.plans == (plan,)
    assert "smallest feasible budget" in found.notes[0]


def test_hand_made_decisions_are_set_beside_plans_of_the_integer_program(profile: Profile) -> None:
    manual = plan_from_decisions(profile, some_decisions(Dataflow(profile, "model"), "ksr"))
    found = planned(profile, manual, ("100%",))
    assert [each.policy for each in found.plans] == ["manual", "ilp"]
    assert found.notes == ("The other budgets were planned by ilp.",)


def test_parameters_of_the_policy_are_those_of_the_given_plan(profile: Profile) -> None:
    tuned = pooch.plan(profile, "95%", policy="tflms", policy_options={"n_tensors": 4})
    found = planned(profile, tuned, ("97%",))
    assert [each.policy for each in found.plans] == ["tflms(n_tensors=4)"] * 2


@pytest.mark.parametrize(
    ("options", "told"),
    [({"bound": "arena"}, ("Budgets bound", "the arena")), ({"microbatches_in_flight": 3}, ("Microbatches", "3 in"))],
)
def test_other_budgets_are_for_what_the_given_one_is_for(
    profile: Profile, options: dict[str, Any], told: tuple[str, str], tmp_path: Path
) -> None:
    given = pooch.plan(profile, "80%", explain=False, **options)
    path = tmp_path / "page.html"
    found = write_report(profile, given, path, budgets=("90%", "100%"))
    assert len(found.plans) == 3
    assert {(each.bound, each.microbatches_in_flight) for each in found.plans} == {
        (given.bound, given.microbatches_in_flight)
    }
    assert found.plans[-1].budget_bytes == given.in_core_peak_bytes
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text())
    data = json.loads(text)
    assert data["in_core"]["peak_bytes"] == given.in_core_peak_bytes
    assert told[1] in data["facts"][told[0]]


@pytest.mark.parametrize("text", ["", "60%,", ",60%"])
def test_budgets_that_do_not_parse_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="60%,800MB"):
        parse_budgets(text)


def test_too_many_budgets_are_refused_before_any_is_planned(profile: Profile, plan: Plan) -> None:
    with pytest.raises(UsageError, match="at most 50"):
        planned(profile, plan, 51)
    with pytest.raises(UsageError, match="at most 50"):
        parse_budgets("9" * 5000)


def test_numbers_are_those_of_the_plan(profile: Profile, plan: Plan) -> None:
    found = contents_of(profile, plan)
    (shown,) = found["plans"]
    timeline = simulate(profile, plan)
    assert max(shown["curve"]["live_bytes"]) == shown["peak_bytes"] == plan.predicted_peak_bytes
    assert shown["step_ms"] == pytest.approx(plan.predicted_step_ms)
    assert sum(len(bars["target"]) for bars in shown["bars"]) == len(timeline.intervals)
    assert [row[0] for row in shown["rows"]] == [plan.decisions[value] for value, _ in found["rows"]]
    assert sum(count for count, _ in shown["choices"].values()) == len(plan.choices)
    slots = shown["curve"]["slot"]
    assert slots == sorted(slots)
    assert slots[-1] == len(profile.ops) - 1


def test_a_long_step_is_drawn_with_fewer_points_and_bars_and_says_so(
    profile: Profile, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MOST_POINTS", 20)
    monkeypatch.setattr(contents, "MOST_BARS", 5)
    monkeypatch.setattr(contents, "MOST_ROWS", 4)
    found = contents_of(profile, plan)
    (shown,) = found["plans"]
    assert len(shown["curve"]["time_ms"]) <= 22
    assert max(shown["curve"]["live_bytes"]) == plan.predicted_peak_bytes
    assert all(len(bars["target"]) <= 6 for bars in shown["bars"])
    intervals = simulate(profile, plan).intervals
    assert sum(sum(bars["count"]) for bars in shown["bars"]) == len(intervals), "each interval is in one bar"
    assert len(shown["rows"]) == len(found["rows"]) == 4
    listed = sum(profile.values[value].size_bytes for value, _ in found["rows"])
    assert listed == sum(sorted((each.size_bytes for each in plan.choices), reverse=True)[:4])
    told = " ".join(found["notes"])
    assert "lists the 4 largest" in told
    assert f"{len(profile.ops)} ops" in told


def test_other_times_than_the_plan_was_made_for_are_told(profile: Profile, plan: Plan) -> None:
    assert not any("was made for a step of" in note for note in contents_of(profile, plan)["notes"])
    slower = replace(profile, ops=tuple(replace(op, time_ms=2 * op.time_ms) for op in profile.ops))
    assert any("was made for a step of" in note for note in contents_of(slower, plan)["notes"])


def test_no_label_gets_out_of_the_data() -> None:
    text = json_for_html({"label": "</script><!--<b>&amp;\u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text)["label"] == "</script><!--<b>&amp;\u2028"


def test_a_plan_of_another_profile_is_refused_before_anything_is_planned(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(PlanMismatch, match="plan this profile"):
        write_report(blocks(3, link=FAST_LINK), plan, tmp_path / "page.html", progress=pytest.fail)
    assert not list(tmp_path.iterdir())


def test_without_plotly_there_is_one_line_with_the_remedy(
    pooch_command: Command, written: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    outcome = pooch_command("report", written[1], "--profile", written[0], "-o", tmp_path / "page.html")
    assert outcome.code == 2
    assert outcome.error_line.endswith("not installed: pip install plotly")


@pytest.fixture
def written(profile: Profile, plan: Plan, tmp_path: Path) -> tuple[Path, Path]:
    paths = (tmp_path / "profile.json", tmp_path / "plan.json")
    profile.save(paths[0])
    plan.save(paths[1])
    return paths


def test_the_command_writes_the_page_and_says_what_it_wrote(
    pooch_command: Command, written: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    asked = ("report", written[1], "--profile", written[0], "-o", page, "--budgets", "90%,min")
    record = json.loads(pooch_command(*asked, "--json").out)
    assert record["size_bytes"] == page.stat().st_size
    assert len(record["plans"]) == 3
    again = pooch_command(*asked)
    assert again.code == 2
    assert "--force" in again.error_line
    assert f"wrote {page}" in pooch_command(*asked, "--force").out
