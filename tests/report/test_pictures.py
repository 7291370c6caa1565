"""Curves, bars and traces hold what the timeline says; figures have what people look for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.api.planning import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import UsageError
from pooch.ir import Plan, Profile
from pooch.report.curves import plan_picture, profile_picture, stream_bars
from pooch.report.figures import draw_plan, draw_profile, save_figure
from pooch.report.trace import trace_text
from tests.toys import SLOW_LINK, blocks, some_decisions


@pytest.fixture
def profile() -> Profile:
    return blocks(4, size_bytes=2000, link=SLOW_LINK)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    decisions = some_decisions(Dataflow(profile, "model"), "ssr")
    lowest = plan_from_decisions(profile, decisions)
    return plan_from_decisions(profile, decisions, lowest.predicted_peak_bytes)


def test_the_picture_of_a_plan_has_both_curves_and_all_streams(profile: Profile, plan: Plan) -> None:
    picture = plan_picture(profile, plan)
    assert picture.in_core.live_bytes.max() == profile.peak_bytes
    assert picture.planned.live_bytes.max() == plan.predicted_peak_bytes
    assert picture.planned.time_ms[-1] == pytest.approx(plan.predicted_step_ms)
    assert picture.budget_bytes == plan.budget_bytes
    kinds = {(bars.stream, bars.kind) for bars in picture.bars}
    assert {("compute", "op"), ("compute", "replay"), ("copy_out", "copy"), ("copy_in", "copy")} <= kinds


def test_bars_cover_the_intervals_and_merge_only_neighbours(profile: Profile, plan: Plan) -> None:
    timeline = simulate(profile, plan)
    for bars in stream_bars(timeline):
        spans = [(i.start_ms, i.end_ms) for i in timeline.intervals if (i.stream, i.kind) == (bars.stream, bars.kind)]
        drawn_ms = sum(duration for _, duration in bars.spans_ms)
        meant_ms = sum(end - start for start, end in spans)
        assert len(bars.spans_ms) <= len(spans)
        assert meant_ms - 1e-9 <= drawn_ms <= meant_ms + len(spans) * timeline.step_ms / 2000


def test_the_picture_of_a_profile_names_its_largest_layers_in_forward_order(profile: Profile) -> None:
    picture = profile_picture(profile, longest=3)
    assert len(picture.layers) == 3
    assert "3 largest of" in picture.layers_title
    numbers = [int(layer.removeprefix("layer")) for layer, _ in picture.layers]
    assert numbers == sorted(numbers)


def test_a_figure_of_a_plan_has_budget_line_boundary_legend_and_units(profile: Profile, plan: Plan) -> None:
    memory, streams = draw_plan(profile, plan).axes
    labels = [text.get_text() for text in memory.get_legend().get_texts()]
    assert any(label.startswith("in-core: peak") for label in labels)
    assert any(label.startswith("planned (manual): peak") for label in labels)
    assert any(label.startswith("budget") for label in labels)
    assert {"forward  ", "  backward"} <= {text.get_text() for text in memory.texts}
    assert "MiB" in memory.get_ylabel()
    assert "(ms)" in streams.get_xlabel()
    assert [tick.get_text() for tick in streams.get_yticklabels()] == ["compute", "copy-out", "copy-in"]


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_figures_are_written_in_the_format_of_their_ending(
    profile: Profile, tmp_path: Path, ending: str, start: bytes
) -> None:
    path = tmp_path / f"figure{ending}"
    save_figure(draw_profile(profile), path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_other_endings_are_refused(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        save_figure(draw_profile(profile), tmp_path / "figure.gif")
    assert not list(tmp_path.iterdir())


def test_a_trace_has_every_interval_on_its_stream_and_the_memory_curve(profile: Profile, plan: Plan) -> None:
    timeline = simulate(profile, plan)
    events = json.loads(trace_text(profile, timeline))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.intervals)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "copy-in", "copy-out"]
    for event, interval in zip(slices, timeline.intervals, strict=True):
        assert names[event["tid"]] == interval.stream.replace("_", "-")
        assert event["ts"] == pytest.approx(1000 * interval.start_ms)
        assert event["ts"] + event["dur"] == pytest.approx(1000 * interval.end_ms)
    counters = [event["args"]["live"] for event in events if event["ph"] == "C"]
    assert max(counters) == timeline.peak_bytes
