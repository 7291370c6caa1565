"""What users see of objects in their hands: one short line, in a notebook a small table with a picture, and `plot`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import pooch
from pooch.api.batch_search.results import MaxBatch, SizePoint, Sizes
from pooch.errors import UsageError
from pooch.executor.statistics import RunStats, RunTotals
from pooch.executor.verification import Difference, Verified
from pooch.ir import Device, Plan, Profile, Schedule, Timeline
from pooch.report.notebook import MOST_ROWS
from tests.toys import FAST_LINK, blocks, chain

RESNET = Path("profiles/resnet50-b16-cpu.json")
MOST_CHARACTERS, MOST_HTML = 130, 60_000
TERABYTES = 2**45
EVIL = '<script>alert(1)</script> & "quotes" \x1b[31m\n' * 3


@pytest.fixture(scope="module")
def profile() -> Profile:
    return blocks(12, link=FAST_LINK)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return pooch.plan(profile, "80%", explain=False)


@pytest.fixture(scope="module")
def timeline(profile: Profile, plan: Plan) -> Timeline:
    return pooch.simulate(profile, plan)


class Elements(HTMLParser):
    """What HTML consists of: names of elements and attributes, and whether each element that opens also closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def is_bounded_line(text: str) -> bool:
    return text.isprintable() and len(text) <= MOST_CHARACTERS


def test_a_profile_says_what_it_is_in_one_line() -> None:
    profile = Profile.load(RESNET)
    expected = r"Profile\(resnet50, batch 16, cpu: 1\.51 GiB peak, \d\.\d+ s, 106 activations\)"
    assert re.fullmatch(expected, repr(profile))
    modelled = replace(profile, device=Device("cuda", "V100-PCIe", 2**34, modelled=True))
    assert "V100-PCIe, modelled: 1.51 GiB" in repr(modelled)


def test_plans_schedules_and_timelines_say_what_they_are(plan: Plan, timeline: Timeline) -> None:
    counts = [list(plan.decisions.values()).count(choice) for choice in ("keep", "swap", "recompute")]
    assert repr(plan).startswith(f"Plan({plan.workload} by ilp: ")
    assert repr(plan).endswith("keep {}, swap {}, recompute {})".format(*counts))
    assert repr(plan.schedule).startswith(f"Schedule({len(plan.schedule.actions)} actions, {counts[1]} swapped")
    assert re.fullmatch(r"Timeline\(.*: .* peak.*\)", repr(timeline))


def test_lines_are_short_whatever_the_objects_hold(plan: Plan, profile: Profile, timeline: Timeline) -> None:
    evil = replace(profile, workload=EVIL, batch_size=10**9, device=Device("cuda", EVIL, 1, modelled=True))
    largest = replace(
        plan,
        workload=EVIL,
        policy=EVIL,
        budget_bytes=TERABYTES,
        predicted_peak_bytes=TERABYTES,
        choices=plan.choices * 900,
    )
    long = replace(timeline, step_ms=1e7, stall_ms=1e6, replay_ms=1e6, peak_bytes=TERABYTES, host_bytes=TERABYTES)
    difference = Difference("aten.gelu.default", EVIL, EVIL, was_survived=True)
    objects = [evil, largest, long, Schedule((), (), (), (), (), TERABYTES), Verified(differences=(difference,) * 50)]
    objects += [RunStats(*[10**5] * (len(fields(RunStats)) - 1)), RunTotals(*[10**6] * 5)]
    for each in objects:
        assert is_bounded_line(repr(each)), repr(each)


def test_what_is_zero_in_the_counters_of_a_run_is_left_out() -> None:
    assert repr(RunStats(host_step_ms=12.3, peak_bytes=2**20)) == "RunStats(12.3 ms, 1.00 MiB peak)"
    assert repr(RunTotals(steps=1)) == "RunTotals(1 step)"
    assert repr(Verified(recipes=3, proven=3)) == "Verified(3 recipes, all proven)"


def test_a_batch_search_says_what_it_found(plan: Plan) -> None:
    point = SizePoint(80, 80, 100, 1.0, 60, 1.1, 1.0, plan)
    found = MaxBatch("toy", "ilp", 2**30, Device("cpu", "", 1), "fake", Sizes(), point, None, (0, 0), (point,), 5, 2)
    assert repr(found) == "MaxBatch(toy, budget 1.00 GiB: batch_size 80 by ilp, none without a plan)"
    assert len(repr(point)) < 400  # its plan is in it


View = Callable[[Profile, Plan, Timeline], str]
VIEWS: dict[str, View] = {
    "profile": lambda profile, *_: profile._repr_html_(),
    "plan": lambda _, plan, __: plan._repr_html_(),
    "timeline": lambda *objects: objects[2]._repr_html_(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_notebook_shows_a_table_and_a_picture(name: str, profile: Profile, plan: Plan, timeline: Timeline) -> None:
    text = VIEWS[name](profile, plan, timeline)
    elements = Elements(text)
    assert {"table", "svg"} <= set(elements.names)
    assert "script" not in elements.names
    assert not any(attribute.startswith("on") or attribute in ("src", "href") for attribute in elements.attributes)
    assert "http" not in text
    assert "nan" not in text


@pytest.mark.parametrize("name", VIEWS)
def test_texts_of_a_file_are_shown_and_not_obeyed(name: str, profile: Profile, plan: Plan, timeline: Timeline) -> None:
    decision = replace(plan.choices[0], label=EVIL, reason=EVIL)
    evil_plan = replace(plan, workload=EVIL, policy=EVIL, notes=(EVIL,) * 100, choices=(decision, *plan.choices[1:]))
    ops = tuple(replace(op, module=EVIL if op.module else "") for op in profile.ops)
    evil = replace(profile, workload=EVIL, notes=(EVIL,) * 100, ops=ops, device=Device("cpu", EVIL, 1))
    text = VIEWS[name](evil, evil_plan, timeline)
    assert "script" not in Elements(text).names
    assert "\x1b" not in text
    assert len(text) < MOST_HTML


def test_a_notebook_stays_small_with_large_documents() -> None:
    profile = chain(1500)
    plan = pooch.plan_from_decisions(profile, {value.id: "swap" for value in profile.activations})
    texts = [profile._repr_html_(), plan._repr_html_(), pooch.simulate(profile, plan)._repr_html_()]
    assert max(map(len, texts)) < MOST_HTML
    assert f"decisions on the {MOST_ROWS} largest of" in texts[1]
    large = Profile.load(RESNET)
    assert "more rows" in large._repr_html_()
    assert len(large._repr_html_()) < MOST_HTML


def test_a_notebook_shows_a_plan_that_decides_on_nothing(plan: Plan) -> None:
    nothing = replace(plan, choices=(), budget_bytes=0, in_core_peak_bytes=0, in_core_step_ms=0.0)
    assert "plan of blocks12 by ilp" in Elements(nothing._repr_html_()).text
    assert repr(nothing).endswith(" MiB, keep 0, swap 0, recompute 0)")


def test_figures_are_drawn_by_methods(profile: Profile, plan: Plan, timeline: Timeline, tmp_path: Path) -> None:
    for name, figure in {
        "profile.png": profile.plot(tmp_path / "profile.png", depth=1),
        "plan.svg": plan.plot(profile, str(tmp_path / "plan.svg")),
        "timeline.pdf": timeline.plot(tmp_path / "timeline.pdf"),
    }.items():
        assert len(figure.axes) == 2
        assert (tmp_path / name).stat().st_size > 5000
    assert profile.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="give a file that ends in"):
        profile.plot(tmp_path / "profile.gif")


def test_a_page_is_written_by_a_method(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    plan.report(tmp_path / "page.html", profile, budgets=0)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
