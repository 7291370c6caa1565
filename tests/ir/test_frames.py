"""Tables of profiles, plans and timelines: their rows and sums are those of the data."""

from __future__ import annotations

import pytest

import pooch
from pooch.api.manual import plan_from_decisions
from tests.toys import blocks, chain


def test_a_profile_has_one_row_per_activation() -> None:
    profile = blocks(2)
    frame = profile.to_frame()
    assert list(frame.index) == [value.id for value in profile.activations]
    assert frame["size_bytes"].sum() == sum(value.size_bytes for value in profile.activations)
    first = profile.activations[0]
    assert frame.loc[first.id, "layer"] == profile.ops[first.producer].module
    assert frame.loc[first.id, "copy_out_ms"] == pytest.approx(profile.link.out_ms(first.size_bytes))


def test_what_cannot_be_recomputed_has_no_replay_time_and_says_why() -> None:
    frame = pooch.activation_costs(blocks(1))
    refused = frame[frame["replay_ms"].isna()]
    assert list(refused["refusal"]) == ["it draws noise"]


def test_a_plan_has_one_row_per_decision() -> None:
    profile = chain(4)
    chosen = {profile.activations[1].id: "recompute"}
    frame = plan_from_decisions(profile, chosen).to_frame()
    assert frame["choice"].to_dict() == {value.id: chosen.get(value.id, "keep") for value in profile.activations}
    assert frame.loc[profile.activations[1].id, "reason"] == "decided by hand"


def test_a_timeline_has_one_row_per_interval_and_they_fill_the_step() -> None:
    profile = chain(4)
    timeline = pooch.simulate(profile, plan_from_decisions(profile, {profile.activations[1].id: "recompute"}))
    frame = timeline.to_frame()
    compute = frame[frame["stream"] == "compute"]
    assert compute["duration_ms"].sum() == pytest.approx(timeline.step_ms)
    assert list(compute["kind"]).count("replay") == 1


def test_a_memory_curve_has_two_rows_per_slot_in_order_of_time() -> None:
    profile = chain(4)
    timeline = pooch.simulate(profile, plan_from_decisions(profile, {}))
    curve = timeline.memory_curve()
    assert len(curve) == 2 * len(profile.ops)
    assert curve["time_ms"].is_monotonic_increasing
    assert curve["live_bytes"].max() == timeline.peak_bytes == profile.peak_bytes
