"""The page of a run under `pooch.auto`, with its plans."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.autopilot import AutoSummary, PlannedShape
from pooch.autopilot.loop_times import Beside
from pooch.autopilot.summary import Counters, StepTimes, Told, between, counted
from pooch.executor.statistics import RunStats
from pooch.report.page import live
from pooch.report.page.live import LivePage
from pooch.report.page.run import write_run_report
from tests.toys import FAST_LINK, blocks


def test_the_page_of_a_run_holds_every_plan(tmp_path: Path) -> None:
    profile = blocks(4, link=FAST_LINK)
    plans = [pooch.plan(profile, share) for share in ("80%", "60%")]
    shapes = tuple(PlannedShape(name, "recorded", "plan", 7, 9, 5, 1.25, "<why>") for name in ("1x2", "3x4"))
    summary = AutoSummary(
        steps_on_plan=14,
        peak_bytes=98,
        between_peak_bytes=5,
        lost_ms=1.0,
        swapped_bytes=6,
        budget_bytes=99,
        shapes=shapes,
        events=("planned",),
        verified=pooch.Verified(recipes=3, proven=3, compared=6),
    )
    path = tmp_path / "run.html"
    write_run_report(summary, [("1x2", profile, plans[0]), ("3x4", profile, plans[1])], path, title="train.py")
    page = path.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    pages = json.loads(found.group(1))["pages"]
    assert [each["name"] for each in pages] == ["1x2", "3x4"]
    assert [each["plans"][0]["budget_bytes"] for each in pages] == [plan.budget_bytes for plan in plans]
    assert '<select id="pages">' in page
    assert "<td>1x2</td><td>7</td>" in page
    for line in summary.totals:
        assert f"<p>{html.escape(line)}</p>" in page
    assert "3 recipes, all proven" in page
    assert "&lt;why&gt;" in page
    assert "<why>" not in page


SUMMARY = AutoSummary(steps_on_plan=9, steps_online=1, peak_bytes=98 * 2**20, budget_bytes=99 * 2**20)
ALL_TIMES = ("ms_on_plan", "plain_ms_on_plan", "predicted_ms_on_plan", "steps_ms", "compared_ms", "lost_ms")
TIMES = {"ms_on_plan": 102.0, "plain_ms_on_plan": 100.0, "predicted_ms_on_plan": 104.0}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "Budget held: 98.00 of 99.00 MiB in all 10 steps"),
        (TIMES, "steps; steps on a plan 2% slower, predicted 4%"),
        ({"recomputed_ops": 1, "verified": pooch.Verified(compared=1)}, "steps; replays gave the same numbers"),
        ({"recomputed_ops": 1}, "steps; replays not compared"),
        (
            {"peak_bytes": 100 * 2**20, "steps_over_budget": 1},
            "Budget exceeded by 1.00 MiB in 1 of 10 steps: 100.00",
        ),
        (
            {"steps_over_budget": 1},
            "Budget exceeded in 1 of 10 steps, before the optimizer's state counted",
        ),
        ({"between_peak_bytes": 100 * 2**20}, "steps, but exceeded by 1.00 MiB between them, as in optimizer.step()"),
        ({"before_bytes": 100 * 2**20}, "steps, but 100.00 MiB were live before the first"),
        (
            {"between_peak_bytes": 100 * 2**20, "before_bytes": 101 * 2**20},
            "but exceeded by 1.00 MiB between them, as in optimizer.step(), and 101.00 MiB were live before the first",
        ),
        (
            {"peak_bytes": 101 * 2**20, "steps_over_budget": 1, "between_peak_bytes": 100 * 2**20},
            "steps: 101.00 of 99.00 MiB, and exceeded by 1.00 MiB between them, as in optimizer.step()",
        ),
        ({"budget_bytes": None}, "Budget not known yet: peak 98.00 MiB in all 10 steps"),
        ({"steps_on_plan": 0}, "in the one step; no step on a plan yet"),
        ({"steps_on_plan": 0, "steps_online": 0}, "no step was run under the budget"),
        (
            {"steps_on_plan": 0, "steps_online": 0, "steps_in_core": 2},
            "in both steps; everything fits: you do not need a plan",
        ),
    ],
)
def test_the_verdict_of_a_summary_comes_first(changes: dict[str, Any], verdict: str) -> None:
    first, *_ = str(replace(SUMMARY, **changes)).splitlines()
    assert first.startswith("pooch: ")
    assert verdict in first


def test_times_far_from_their_prediction_are_doubted() -> None:
    busy = replace(SUMMARY, ms_on_plan=312.0, plain_ms_on_plan=100.0, predicted_ms_on_plan=104.0)
    assert "steps on a plan took 3.00x what was predicted; hooks and copies cost more than" in busy.totals[1]
    slow = replace(busy, ms_on_plan=80.0)
    assert "steps on a plan took 0.77x what was predicted; ops took longer when the step was rec" in slow.totals[1]
    for kept_ms in (96.0, 113.0):
        assert not any("was not kept" in line for line in replace(busy, ms_on_plan=kept_ms).totals)


def test_moving_that_took_longer_than_predicted_is_the_reason_for_the_doubt() -> None:
    moved = replace(SUMMARY, ms_on_plan=150e3, plain_ms_on_plan=100e3, predicted_ms_on_plan=120e3)
    moved = replace(moved, moving_ms=45e3, predicted_moving_ms=19e3)
    what = "moving parameters, gradients and the optimizer's state"
    assert f"took 1.25x what was predicted; {what} took 45.0 s of it instead of 19.0 s" in moved.totals[1]
    assert "hooks and copies cost more" in replace(moved, predicted_moving_ms=40e3).totals[1]
    assert "ops took longer" in replace(moved, ms_on_plan=100e3).totals[1], "which moving does not explain"
    no_plan = replace(moved, steps_on_plan=0, steps_in_core=9)
    assert "; steps 50% slower, predicted 20%" in no_plan.totals[0]


def test_what_optimizers_take_belongs_to_the_step_before() -> None:
    told = Told(plain_ms=100.0, step_ms=140.0, optimizer_ms=20.0, moving_ms=30.0)
    step = counted("in-core", False, RunStats(), 1, StepTimes(105.0, 100.0, 4.0, told), is_over_budget=False)
    both = step.with_step(between(Beside(21.0, 26.0), is_compared=True))
    assert (both.ms_on_plan, both.plain_ms_on_plan, both.predicted_ms_on_plan) == (105 + 21 + 26, 120, 160)
    assert (both.moving_ms, both.predicted_moving_ms, both.lost_ms, both.steps_ms) == (30, 30, 30, 152)
    other = step.with_step(between(Beside(21.0, 26.0), is_compared=False))
    assert (other.ms_on_plan, other.lost_ms, other.steps_ms) == (105, 30, 152)
    assert told.slowdown == 160 / 120


def test_steps_without_a_plan_are_compared_with_what_they_take_without_what_pooch_did() -> None:
    times = StepTimes(150.0, 100.0, 50.0, Told(plain_ms=50.0, step_ms=70.0, moving_ms=20.0, decision="online"))
    step = counted("online", False, RunStats(), 1, times, is_over_budget=False)
    assert (step.ms_on_plan, step.plain_ms_on_plan, step.predicted_ms_on_plan) == (150, 100, 140), (
        "twice as slow by now"
    )
    assert (step.lost_ms, step.compared_ms, step.predicted_moving_ms) == (50, 150, 40)
    only = replace(SUMMARY, steps_on_plan=0, **{name: getattr(step, name) for name in TIMES})
    assert only.totals[0].endswith("steps at least 50% slower, predicted 40%")
    first = counted("online", False, RunStats(), 1, StepTimes(200.0, 100.0, 100.0), is_over_budget=False)
    both = step.with_step(first).with_step(first)
    few = replace(SUMMARY, steps_on_plan=0, steps_online=3, **{name: getattr(both, name) for name in ALL_TIMES})
    assert few.totals[0].endswith("; steps at least 83% slower")
    few = replace(few, steps_on_plan=2, steps_online=1)
    assert few.totals[0].endswith("; steps on a plan 50% slower, predicted 40%")


def test_steps_on_a_plan_that_does_not_know_what_hooks_cost_are_compared_with_no_prediction() -> None:
    predictions = (None, Told(100.0, 110.0))
    steps = [
        counted("plan", False, RunStats(), 1, StepTimes(120.0, 100.0, 0.0, each), is_over_budget=False)
        for each in predictions
    ]
    early = replace(SUMMARY, **{name: getattr(steps[0], name) for name in ALL_TIMES})
    assert "; steps about 20% slower, which was not predicted, as what hooks cost is still being measured" in str(early)
    both = Counters().with_step(steps[0]).with_step(steps[1])
    assert (both.steps_on_plan, both.ms_on_plan, both.plain_ms_on_plan, both.predicted_ms_on_plan) == (2, 120, 100, 110)
    assert both.lost_ms == 40.0


def test_what_happened_inside_of_the_steps_is_only_told_when_asked_for() -> None:
    internal = "of the online steps, 0 recorded and 0 that left a plan"
    assert internal not in SUMMARY.totals
    assert internal in replace(SUMMARY, is_verbose=True).totals
    (shape,) = (PlannedShape("8x64, scalar", "recorded", "plan", 1, 2**20, 2**19, 1.25, ""),)
    told = str(replace(SUMMARY, shapes=(shape,)))
    assert "8x64, scalar: 1 step, on a plan; peak without Pooch 1.00 MiB, predicted 512.00 KiB and 25% slower" in told


def test_the_peak_without_pooch_is_at_least_the_highest_that_is_known() -> None:
    recorded = PlannedShape("8x64", "recorded", "plan", 1, 2**20, 2**19, 1.25, "")
    unknown = PlannedShape("32x64", "unknown", "online", 1, None, None, None, "")
    assert "pooch: peak without Pooch 1.00 MiB; " in str(replace(SUMMARY, shapes=(recorded,)))
    assert "pooch: peak without Pooch 1.00 MiB or more; " in str(replace(SUMMARY, shapes=(recorded, unknown)))
    assert "pooch: peak during " in str(replace(SUMMARY, shapes=(unknown,)))


class Clock:
    """Seconds that pass when they are told to; writing takes some too."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_page_of_a_run_is_rewritten_while_it_trains_but_seldom(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.html", Clock()
    steps = [0]

    def summary() -> AutoSummary:
        return AutoSummary(steps_in_core=steps[-1])

    page = LivePage(lambda: path, "train.py", summary, command="pooch exec <x>", clock=clock)
    page.stepped()
    assert not path.exists(), "no step has ended yet"
    seen = []
    for number in range(1, 7):
        steps.append(number)
        page.stepped()
        seen.append(re.search(r"(\d+) steps?:", path.read_text()).group(1))  # type: ignore[union-attr]
        clock.now_s += 0.9
    assert seen == ["1", "1", "1", "4", "4", "4"], "at most every two seconds"
    text = path.read_text()
    assert '<meta http-equiv="refresh" content="3">' in text
    assert "pooch exec &lt;x&gt;</code></footer>" in text
    write_run_report(summary(), [], path, title="train.py")
    assert 'http-equiv="refresh"' not in path.read_text(), "the last version stays as it is"


def test_a_page_that_takes_long_to_write_is_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "run.html", Clock()
    written = []

    def slowly(*given: object, **named: object) -> None:
        clock.now_s += 0.5
        written.append(clock.now_s)

    monkeypatch.setattr(live, "write_live_report", slowly)
    page = LivePage(lambda: path, "train.py", lambda: AutoSummary(steps_in_core=1), clock=clock)
    for _ in range(1000):
        page.stepped()
        clock.now_s += 0.1
    assert 0.5 * len(written) <= 0.02 * (clock.now_s - 100)


def test_a_page_that_cannot_be_written_does_not_disturb_training(tmp_path: Path) -> None:
    calls = []

    def summary() -> AutoSummary:
        calls.append(1)
        return AutoSummary(steps_in_core=1)

    clock = Clock()
    page = LivePage(lambda: tmp_path / "no such folder" / "run.html", "train.py", summary, clock=clock)
    for _ in range(3):
        page.stepped()
        clock.now_s += 60
    assert len(calls) == 1
