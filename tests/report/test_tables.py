"""Tables and records: sums by layer and by choice, what a comparison and a training say."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.measure.comparison import compare
from pooch.api.measure.doubt import doubt_of_sizes, doubt_of_training
from pooch.api.measure.training_report import TrainingReport
from pooch.errors import InfeasibleBudget
from pooch.ir import Device, HookCosts, Plan, Profile
from pooch.report import summaries, tables
from pooch.report.layers import OUTSIDE, choice_frame, layer_frame, layer_of
from pooch.report.training import broken_promise, training_record, training_tables
from pooch.report.verdict import plan_verdict, training_verdict
from tests.toys import FAST_LINK, blocks, some_decisions


def text_of(*shown: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    for each in shown:
        console.print(each)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def profile() -> Profile:
    return blocks(4, link=FAST_LINK)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return plan_from_decisions(profile, some_decisions(Dataflow(profile, "model"), "ksr"))


REPORT = TrainingReport(
    workload="toy",
    policy="ilp",
    steps=3,
    bitwise_equal=True,
    first_difference=None,
    budget_bytes=100 * 2**20,
    predicted_peak_bytes=98 * 2**20,
    measured_peak_bytes=99 * 2**20,
    plain_peak_bytes=160 * 2**20,
    within_budget=True,
    peak_error=-0.0101,
    predicted_step_ms=110.0,
    measured_step_ms=120.0,
    plain_step_ms=100.0,
    slowdown=1.2,
    predicted_slowdown=1.1,
    swapped_out_bytes=2**20,
    swapped_in_bytes=2**20,
    recomputed_ops=7,
    stall_ms=3.0,
    late_swaps=0,
    mismatches=0,
    steps_over_budget=0,
    plain_step_samples_ms=(99.0, 100.0, 101.0),
    measured_step_samples_ms=(119.0, 120.0, 121.0),
    hard_limit_plain=None,
    hard_limit_planned=None,
)


@pytest.mark.parametrize(
    ("path", "depth", "layer"),
    [("a.b.c", 2, "a.b"), ("a.b.c", None, "a.b.c"), ("a", 2, "a"), ("", 2, OUTSIDE), ("", None, OUTSIDE)],
)
def test_layers_are_module_paths_of_some_depth(path: str, depth: int | None, layer: str) -> None:
    assert layer_of(path, depth) == layer


def test_layer_sums_are_those_of_the_profile_and_the_plan(profile: Profile, plan: Plan) -> None:
    frame = layer_frame(profile, plan)
    assert frame["size_bytes"].sum() == sum(value.size_bytes for value in profile.activations)
    assert frame["activations"].sum() == len(profile.activations)
    forward_ms = sum(op.time_ms for op in profile.ops[: profile.forward_ops])
    assert frame["forward_ms"].sum() == pytest.approx(forward_ms)
    by_choice = frame[["keep_bytes", "swap_bytes", "recompute_bytes"]].sum()
    assert by_choice.sum() == frame["size_bytes"].sum()
    assert all(by_choice > 0)


def test_deeper_paths_are_gathered_by_depth(profile: Profile) -> None:
    ops = tuple(replace(op, module=f"net.block{op.index // 5}.op{op.index}") for op in profile.ops)
    frame = layer_frame(replace(profile, ops=ops), depth=2)
    assert list(frame.index) == [f"net.block{number}" for number in range(4)]
    assert len(layer_frame(replace(profile, ops=ops), depth=1)) == 1


def test_choice_sums(plan: Plan) -> None:
    frame = choice_frame(plan)
    assert list(frame.index) == ["keep", "swap", "recompute"]
    assert frame["activations"].sum() == len(plan.choices)
    assert frame.loc["keep", "copy_ms"] == 0
    assert frame.loc["recompute", "replay_ms"] > 0


def test_tables_show_names_and_units(profile: Profile, plan: Plan) -> None:
    text = text_of(tables.profile_table(profile), tables.plan_table(plan), tables.layers_table(profile, plan))
    for told in ("blocks4", "MiB", "layer1", "manual", "in-core"):
        assert told in text
    assert "nan" not in text


def test_what_hooks_cost_is_told_where_it_was_measured(profile: Profile) -> None:
    assert "hooks cost" not in text_of(tables.profile_table(profile))
    hooked = replace(profile, hooks=HookCosts(0.0125, 0.009, 0.04, 0.006))
    assert "12.5 us an op, 6.0 us a view, 9.0 us a replay, 40.0 us a copy" in text_of(
        tables.profile_table(hooked, verbose=True)
    )
    assert "hooks cost" not in text_of(tables.profile_table(hooked))
    costs_ms = {"op_ms": 0.0125, "replay_ms": 0.009, "copy_ms": 0.04, "view_ms": 0.006}
    rest = {"adds_in_place": False, "step_ms": 0.0, "cold_op_ms": 0.0}
    assert summaries.profile_record(hooked)["hooks"] == costs_ms | rest
    cold = replace(profile, hooks=HookCosts(0.0125, 0.009, 0.04, 0.006, cold_op_ms=0.02))
    told = "12.5 us an op and up to 20.0 us more on large tensors, 6.0 us a view"
    assert told in text_of(tables.profile_table(cold, verbose=True))


def test_decisions_tables_keep_to_the_largest(plan: Plan) -> None:
    text = text_of(tables.decisions_table(plan, longest=3))
    assert f"3 largest of {len(plan.choices)} activations" in text
    assert text.count("decided by hand") == 3


def test_a_plan_without_decisions_has_a_table(plan: Plan) -> None:
    without = replace(plan, choices=())
    assert without.to_frame().empty
    assert "0 of" not in text_of(tables.decisions_table(without))


def test_a_comparison_says_what_does_not_fit(profile: Profile) -> None:
    rows = compare(profile, ["60%"], policies=["keep_all", "recompute_all"])
    text = text_of(tables.comparison_table(rows))
    assert "needs" in text
    records = [summaries.comparison_record(row) for row in rows]
    assert [record["feasible"] for record in records] == [row.plan is not None for row in rows]
    json.dumps(records, allow_nan=False)


def test_records_are_json_also_without_a_bound(profile: Profile, plan: Plan) -> None:
    unbounded = replace(plan, lower_bound_ms=float("-inf"), gap=float("inf"))
    record = summaries.plan_record(unbounded)
    assert record["lower_bound_ms"] is None
    json.dumps([record, summaries.profile_record(profile)], allow_nan=False)


def test_devices_are_told_with_rates() -> None:
    device = Device("cpu", "a processor", 2**34, software={"torch": "2"})
    text = text_of(*tables.devices_tables([(device, FAST_LINK)]))
    assert "a processor" in text
    assert "16.00 GiB" in text
    json.dumps(summaries.device_record(device, FAST_LINK), allow_nan=False)


def test_a_training_that_kept_its_promises() -> None:
    text = text_of(*training_tables(REPORT))
    for told in ("99.00 MiB", "100.00 MiB", "1.200", "yes, bitwise", "7 ops"):
        assert told in text
    assert broken_promise(REPORT) is None
    assert training_record(REPORT)["kept"] is True
    assert "late swaps" not in text
    assert "late swaps" in text_of(*training_tables(REPORT, verbose=True))
    assert "120.0 ms (119.0 ms to 121.0 ms)" in text


HELD = "Budget held: 99.00 of 100.00 MiB in all 3 steps; "


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, HELD + "same numbers as plain training; 20% slower, predicted 10%"),
        (
            {"compared_deterministically": True, "slowdown": 1.001},
            "deterministic algorithms; just as fast, predicted 10% s",
        ),
        ({"bitwise_equal": False, "slowdown": 0.97}, "NOT the same numbers; 3% faster, predicted 10% slower"),
        ({"bitwise_equal": None, "replay_differences": 0}, "; replays gave the same numbers; 20% slower"),
        ({"bitwise_equal": None, "replay_differences": 1}, "; 1 replay gave other numbers, and copies took its place"),
        ({"bitwise_equal": None}, "; numbers not compared (--check); "),
        ({"bitwise_equal": None, "repeatable": False}, "plain training do not repeat"),
        ({"slowdown": 2.53, "predicted_slowdown": 0.997}, "; 2.5 times as long, predicted just as fast"),
        ({"slowdown": None}, "predicted 10% slower than plain steps, which do not fit here"),
        (
            {"measured_peak_bytes": 101 * 2**20, "steps_over_budget": 2},
            "Budget exceeded by 1.00 MiB in 2 of 3 steps: 101.00 of 100.00 MiB; same",
        ),
        (
            {"measured_peak_bytes": 100 * 2**20 + 900, "rounding_bytes": 900},
            "Budget held in all 3 steps, but for the allocator's rounding: 100.00 of 100.00 MiB; ",
        ),
        ({"steps": 1}, "MiB in the one step; "),
        ({"steps": 2, "budget_bytes": 2**30}, "Budget held: 99.00 MiB of 1.00 GiB in both steps; "),
        ({"steps_off_plan": 1}, "Budget not judged: 1 of 3 steps left the plan; peak 99.00 MiB; "),
        ({"budget_bytes": None}, "Peak 99.00 MiB in all 3 steps; same numbers"),
    ],
)
def test_the_verdict_says_what_is_known_and_nothing_else(changes: dict[str, object], verdict: str) -> None:
    report = replace(REPORT, **changes)  # type: ignore[arg-type]
    assert verdict in training_verdict(report)
    assert training_record(report)["verdict"] == training_verdict(report)


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, None),
        ({"in_core_step_ms": 80.0}, None),
        ({"plain_step_samples_ms": (60.0, 100.0, 180.0)}, "vary by 3.0x: the machine is busy; repeat with --repeats 5"),
        ({"measured_step_samples_ms": (100.0, 120.0, 150.0)}, "times vary by 1.5x: "),
        (
            {"in_core_step_ms": 150.0},
            "a plain step takes 100.0 ms now and 150.0 ms in the profile: the machine",
        ),
        ({"in_core_step_ms": 70.0}, "a plain step takes 100.0 ms now and 70.0 ms in the profile: "),
    ],
)
def test_times_that_contradict_one_another_are_doubted(changes: dict[str, object], doubt: str | None) -> None:
    found = doubt_of_training(replace(REPORT, **changes))  # type: ignore[arg-type]
    assert found is None if doubt is None else doubt in str(found)


def test_a_larger_size_that_is_faster_is_doubted() -> None:
    assert doubt_of_sizes((15, 19, 24), (100.0, 120.0, 130.0)) is None
    doubt = doubt_of_sizes((15, 19, 24), (100.0, 1122.0, 1000.0))
    assert doubt is not None
    assert "a plain step takes 1.000 s at 24, and 1.122 s at 19: the machine is busy" in doubt


def test_a_budget_in_which_everything_fits_needs_no_plan(profile: Profile) -> None:
    roomy, tight = (pooch.plan(profile, budget) for budget in ("250%", "60%"))
    assert plan_verdict(roomy) == "everything fits: you do not need a plan"
    assert plan_verdict(tight).startswith("Predicted: ")
    assert [summaries.plan_record(plan)["fits_without_a_plan"] for plan in (roomy, tight)] == [True, False]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (replace(REPORT, bitwise_equal=False, first_difference="step 2: loss"), "step 2: loss"),
        (replace(REPORT, within_budget=False, measured_peak_bytes=2**30), "over the budget"),
        (replace(REPORT, hard_limit_planned="died: MemoryError"), "died: MemoryError"),
        (
            replace(REPORT, hard_limit_arena="died: memory ran out"),
            "on an arena under the hard limit died",
        ),
    ],
)
def test_a_training_that_broke_a_promise(report: TrainingReport, told: str) -> None:
    message = broken_promise(report)
    assert message is not None
    assert told in message
    assert training_record(report)["kept"] is False


def test_a_plain_training_has_nothing_to_keep() -> None:
    nothing = dict.fromkeys(TrainingReport.__dataclass_fields__)
    plain = TrainingReport(**(nothing | {"workload": "toy", "steps": 1, "measured_peak_bytes": 5, "policy": "none"}))
    assert broken_promise(plain) is None
    assert "not checked" in text_of(*training_tables(plain))


def test_decisions_are_told_in_numbers_or_in_words(profile: Profile) -> None:
    # GIVEN a plan at the smallest budget, where hardly anything more can be kept
    with pytest.raises(InfeasibleBudget) as raised:
        pooch.plan(profile, "1%")
    plan = pooch.plan(profile, raised.value.minimum_bytes)
    numbers, words = text_of(tables.decisions_table(plan)), text_of(tables.decisions_table(plan, reasons=True))
    frame = plan.to_frame()
    # THEN the numbers are those of the frame, and the words are the reasons
    assert "if kept" in numbers
    assert numbers.count("too big") == (frame.filter(like="_change_ms") == float("inf")).sum().sum() > 0
    assert max(len(line) for line in numbers.splitlines()) <= 120
    assert "reason" in words
    assert "too much" in words
