"""Curves, bars and traces hold what the timeline says; figures have what people look for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.batch_search.results import MaxBatch, SizePoint, Sizes
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import UsageError
from pooch.ground.units import format_bytes
from pooch.ir import Plan, Profile
from pooch.report.curves import stream_bars
from pooch.report.figures import draw_plan, draw_profile, save_figure
from pooch.report.growing import draw_max_batch
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


def test_bars_cover_the_intervals_and_merge_only_neighbours(profile: Profile, plan: Plan) -> None:
    timeline = simulate(profile, plan)
    found = stream_bars(timeline)
    assert {("compute", "op"), ("compute", "replay"), ("copy_out", "copy"), ("copy_in", "copy")} <= found.keys()
    for stream_and_kind, bars in found.items():
        spans = [(i.start_ms, i.end_ms) for i in timeline.intervals if (i.stream, i.kind) == stream_and_kind]
        drawn_ms = sum(duration for _, duration in bars)
        meant_ms = sum(end - start for start, end in spans)
        assert len(bars) <= len(spans)
        assert meant_ms - 1e-9 <= drawn_ms <= meant_ms + len(spans) * timeline.step_ms / 2000


def test_the_figure_of_a_profile_names_its_largest_layers_in_forward_order(profile: Profile) -> None:
    _, layers = draw_profile(profile, longest=3).axes
    assert "3 largest of" in layers.get_title(loc="left")
    numbers = [int(label.get_text().removeprefix("layer")) for label in layers.get_yticklabels()]
    assert len(numbers) == 3
    assert numbers == sorted(numbers)


def test_a_figure_of_a_plan_has_budget_line_boundary_legend_and_units(profile: Profile, plan: Plan) -> None:
    memory, streams = draw_plan(profile, plan).axes
    labels = [text.get_text() for text in memory.get_legend().get_texts()]
    for start, peak_bytes in (
        ("in-core: peak", profile.peak_bytes),
        ("planned (manual): peak", plan.predicted_peak_bytes),
        ("budget", plan.budget_bytes),
    ):
        (label,) = [label for label in labels if label.startswith(start)]
        assert format_bytes(peak_bytes) in label
    in_core, planned, budget, _ = memory.get_lines()
    assert in_core.get_ydata().max() * 2**20 == pytest.approx(profile.peak_bytes)
    assert planned.get_ydata().max() * 2**20 == pytest.approx(plan.predicted_peak_bytes)
    assert planned.get_xdata()[-1] == pytest.approx(plan.predicted_step_ms)
    assert budget.get_ydata()[0] * 2**20 == pytest.approx(plan.budget_bytes)
    assert {"forward  ", "  backward"} <= {text.get_text() for text in memory.texts}
    assert "MiB" in memory.get_ylabel()
    assert "(ms)" in streams.get_xlabel()
    assert [tick.get_text() for tick in streams.get_yticklabels()] == ["compute", "copy-out", "copy-in"]


def test_a_figure_of_a_plan_for_several_microbatches_has_the_in_core_step_of_as_many(profile: Profile) -> None:
    plan = pooch.plan(profile, "80%", microbatches_in_flight=3, explain=False)
    in_core, planned, *_ = draw_plan(profile, plan).axes[0].get_lines()
    assert in_core.get_ydata().max() * 2**20 == pytest.approx(plan.in_core_peak_bytes)
    assert planned.get_ydata().max() * 2**20 == pytest.approx(plan.predicted_peak_bytes)


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


def test_the_picture_of_sizes_says_its_finding_in_one_unit_beside_its_legends(profile: Profile, plan: Plan) -> None:
    mib = 2**20
    curve = tuple(
        SizePoint(size, size, size * mib, in_core_step_ms=9, peak_bytes=mib, step_ms=18, lower_bound_ms=9, plan=plan)
        for size in (20, 50, 80)
    )
    found = MaxBatch(
        "toy", "ilp", 40 * mib, profile.device, "fake", Sizes(), curve[-1], curve[0], (81, 41 * mib), curve, 3, 3
    )
    figure = draw_max_batch(found)
    speed, memory = figure.axes
    title = speed.get_title(loc="left")
    assert title.startswith("toy: batch size 80 fits into 40.00 MiB under a plan,\n4.00 times the 20 that fits in-core")
    assert memory.get_ylabel() == "peak (MiB)"
    assert max(memory.get_lines()[0].get_ydata()) == 80
    figure.draw_without_rendering()
    for axes in (speed, memory):
        assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1, "it hides no point"
    larger = replace(found, budget_bytes=4 * 2**30, in_core=None)
    assert draw_max_batch(larger).axes[1].get_ylabel() == "peak (GiB)"
    assert "none fits in-core" in draw_max_batch(larger).axes[0].get_title(loc="left")
