"""The snapshot of a plan, in the hands of PyTorch's own converters."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz as viz

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.step_lives import lives_of
from pooch.ir import Plan, Profile
from pooch.ir.lives import Life, StepLives
from pooch.report.memory_viz import PROTOCOL, memory_snapshot, write_memory_viz
from tests.toys import FAST_LINK, blocks

# What the viewer's own reader understands: an opcode beyond these would end it.
READ_BY_THE_VIEWER = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    return blocks(5, link=FAST_LINK)


@pytest.fixture(scope="module", params=["keep", "60%", "80%", "swap", "recompute", "mixed"])
def plan(profile: Profile, request: pytest.FixtureRequest) -> Plan:
    if request.param.endswith("%"):
        return pooch.plan(profile, request.param, region="step")
    ids = [value.id for value in profile.activations]
    turns = ("swap", "recompute") if request.param == "mixed" else (request.param,) * 2
    refusal = Dataflow(profile, "step").refusal
    decisions: Any = {each: turns[number % 2] if refusal(each) is None else "swap" for number, each in enumerate(ids)}
    return plan_from_decisions(profile, decisions, region="step")


def peak_of(events: list[dict[str, Any]]) -> int:
    """As the viewer counts: an allocation adds, a completed release takes away; and no block lies on another."""
    live: dict[int, int] = {}
    peak = 0
    for event in events:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or other + size <= begin for other, size in live.items())
            live[begin] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(live.values()))
    return peak


def test_the_peak_of_the_events_is_the_predicted_one(profile: Profile, plan: Plan) -> None:
    lives = lives_of(profile, plan)
    (events,) = memory_snapshot(lives)["device_traces"]
    assert peak_of(events) == lives.peak_bytes == plan.predicted_peak_bytes
    times = [event["time_us"] for event in events]
    assert times == sorted(times)


def test_converters_of_pytorch_take_it(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    write_memory_viz(lives_of(profile, plan), tmp_path / "plan.pickle")
    snapshot = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    assert "total_reserved" in viz.segsum(snapshot)  # which adds up segments, blocks and gaps
    assert "TOTAL MEM" in viz.trace(snapshot)
    for show in (False, True):
        page = viz.trace_plot(snapshot, plot_segments=show)
        held = json.loads(re.search(r"local_files = (.*)", page).group(1))[0]["base64"]  # type: ignore[union-attr]
        assert pickle.loads(base64.b64decode(held)) == snapshot
    lines: list[str] = []
    viz.memory(snapshot, format_flamegraph=lambda text: lines.append(text) or text)
    viz.segments(snapshot, format_flamegraph=lambda text: lines.append(text) or text)
    sizes = [int(line.rpartition(" ")[2]) for line in lines[0].splitlines()]
    assert sum(sizes) == sum(segment["total_size"] for segment in snapshot["segments"])
    viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=str)


def test_the_viewer_can_read_the_file(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    write_memory_viz(lives_of(profile, plan), tmp_path / "plan.pickle")
    text = (tmp_path / "plan.pickle").read_bytes()
    assert {opcode.name for opcode, *_ in pickletools.genops(text)} <= READ_BY_THE_VIEWER
    assert text[1] == PROTOCOL <= 4
    categories = {event.get("category") for event in pickle.loads(text)["device_traces"][0]}
    assert "unknown" in categories, "where there are categories, the viewer ends without this one"


def test_each_decision_is_told_by_a_frame(profile: Profile, plan: Plan) -> None:
    snapshot = memory_snapshot(lives_of(profile, plan))
    seen: dict[str, set[str]] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            frames = {frame["filename"]: frame["name"] for frame in event["frames"]}
            seen.setdefault(frames["value"], set()).add(frames["decision"])
            assert event["frames"][-1]["filename"] == "decision", "the outermost, by which converters group"
            if frames["decision"] in ("kept", "swapped", "recomputed"):
                assert frames["why"]
    words = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}
    moved = {*plan.schedule.swapped, *plan.schedule.recomputed}
    for choice in plan.choices:
        if choice.choice == "keep" or choice.value in moved:
            assert words[choice.choice] in seen[profile.values[choice.value].label]


def test_names_that_converters_would_part_or_leave_out_are_shown() -> None:
    lives = StepLives("any", 10, 20, (Life("kept", "a;b_start", "one; two", 0, 0, 20, 0, None, 0, 1),))
    lines: list[str] = []
    viz.memory(memory_snapshot(lives), format_flamegraph=lambda text: lines.append(text) or text)
    assert "decision:0:kept;value:0:a,b_ start;why:0:one, two 20" in lines[0]
