"""Tables of the benchmarks are made of the stored samples alone, and name the samples that matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import (
    fake_against_run,
    fast_plans,
    long_skips,
    oracle_sweep,
    planner_growth,
    soak,
    soak_interrupted,
    soak_ragged,
    time_limits,
    workloads,
)
from benchmarks.tables import LAYOUT, earlier_results, surroundings, write_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def test_stored_tables_of_bytes_and_decisions_are_what_their_samples_say() -> None:
    assert soak.rows_of(stored("soak-cpu")["results"]) == stored("soak-cpu")["rows"]
    assert soak_ragged.rows_of(stored("soak-ragged-cpu")["results"]) == stored("soak-ragged-cpu")["rows"]
    assert soak_interrupted.rows_of(stored("soak-interrupted-cpu")["results"]) == stored("soak-interrupted-cpu")["rows"]
    assert workloads.workload_rows(stored("workloads")["results"]) == stored("workloads")["rows"]
    assert workloads.attention_rows(stored("attention")["results"]) == stored("attention")["rows"]
    assert (RESULTS / "long-skips.md").read_text() == long_skips.table(stored("long-skips")["curves"])


def test_a_limit_that_was_passed_in_one_of_the_turns_was_not_kept() -> None:
    turns = [
        {"taken_s": taken_s, "gap": gap, "slowdown": 1.08, "status": status}
        for taken_s, gap, status in ((1.0, 0.01, "optimal"), (1.25, 0.02, "feasible"), (1.1, 0.01, "optimal"))
    ]
    result = {"profile": "net", "activations": 7, "share": 0.457, "limit_s": 1.0, "turns": turns}
    (row,) = time_limits.rows_of([result])
    assert (row["taken, s"], row["median, s"], row["kept"]) == ("1.25", "1.10 (1.05-1.18)", "NO")
    assert (row["gap"], row["status"], row["limit, s"]) == ("2.00%", "optimal, feasible", "1")
    (row,) = time_limits.rows_of([result | {"limit_s": 1.05}])
    assert row["kept"] == "yes"


def test_growth_is_told_as_medians_of_the_turns() -> None:
    turns = [
        {"activations": 246, "ops": 675, "layers": 9, "seconds": seconds, "processor_seconds": 2 * seconds,
         "memory_mib": 100.0, "gap": 0.002, "status": "optimal", "slowdown": 1.08754}
        for seconds in (3.0, 1.0, 2.0)
    ]  # fmt: skip
    (row,) = planner_growth.rows_of([turns])
    assert (row["activations"], row["seconds"], row["processor_seconds"]) == (
        246,
        "2.00 (1.50-2.50)",
        "4.00 (3.00-5.00)",
    )
    assert (row["gap"], row["slowdown"]) == (0.002, 1.0875)


def test_profiles_of_both_kinds_are_told_as_medians_of_the_turns() -> None:
    result = {
        "workload": "net", "batch_size": 4, "fake_peak_bytes": 1 << 30, "run_peak_bytes": 1 << 30, "activations": 7,
        "same_activations": True, "same_ops": False,
        "fake": [{"seconds": 1.0, "step_ms": 90.0}, {"seconds": 3.0, "step_ms": 90.0}],
        "run": [{"seconds": 8.0, "step_ms": 100.0}, {"seconds": 8.0, "step_ms": 200.0}],
    }  # fmt: skip
    (row,) = fake_against_run.rows_of([result])
    assert (row["step of the run"], row["fake step"]) == ("150.0 ms (125.0-175.0)", "-40.0%")
    assert (row["profiled by running in"], row["fake in"]) == ("8.0 s (8.0-8.0)", "2.0 s (1.5-2.5)")
    assert (row["the same"], row["forward ops the same"], row["fake"]) == ("yes", "NO", "+0.000%")


def test_modelled_steps_are_told_with_the_time_that_modelling_takes() -> None:
    result = {
        "workload": "net", "device": "V100-PCIe", "peak_bytes": 1 << 30, "activations": 7, "step_ms": 500.0,
        "batch_size": 64, "seconds": [1.0, 2.0, 3.0],
    }  # fmt: skip
    (row,) = fake_against_run.modelled_rows_of([result])
    assert (row["device"], row["items/s"], row["modelled in"]) == ("V100-PCIe (modelled)", "128.0", "2.0 s (1.5-2.5)")


def test_the_page_of_the_oracle_is_made_of_the_stored_steps_alone() -> None:
    good = oracle_sweep.Checked("chains", 1, 5, 243, 0.0, 0.1, 0.99, -1.0)
    bad = oracle_sweep.Checked("chains", 2, 6, 729, 0.02, 0.1, 0.99, -1.0)
    document = json.loads(json.dumps({"command": "the command", "results": [vars(good), vars(bad)]}))
    page = oracle_sweep.page(document)
    assert "Made by `the command`." in page
    assert "| chains | 2 | 5 to 6 | 972 | 1 | 2.000% | 10.0% | 99.000% | 1 |" in page


def test_results_of_other_workloads_stay_and_those_of_another_layout_or_machine_do_not(tmp_path: Path) -> None:
    results = [{"workload": name, "samples": []} for name in ("one", "two")]
    write_results("job", "A job", [{"workload": "one"}], results, tmp_path, {"Steps": [{"turns": 3}]})
    assert earlier_results("job", tmp_path, ["two"]) == results[:1]
    document = json.loads((tmp_path / "job.json").read_text())
    for changed in ({"layout": LAYOUT - 1}, {"surroundings": {**surroundings(), "name": "another machine"}}):
        (tmp_path / "job.json").write_text(json.dumps(document | changed))
        assert earlier_results("job", tmp_path, ["two"]) == []
    assert "\n## Steps\n\n| turns |\n| --- |\n| 3 |\n" in (tmp_path / "job.md").read_text()


def test_a_fast_plan_misses_where_its_median_is_over_a_second_or_its_step_over_a_tenth() -> None:
    result = {
        "profile": "net", "activations": 500, "share": 0.6, "budget_share": 0.6, "fast_cpu_s": [0.4, 0.5, 2.0],
        "full_cpu_s": 9.0, "in_core_ms": 100.0, "fast_ms": 121.1, "fast_gap": 0.1, "full_ms": 110.0, "full_gap": 0.01,
    }  # fmt: skip
    (row,) = fast_plans.rows_of([result])
    assert (row["fast / in-core"], row["fast / best"], row["misses"]) == ("1.2110", "1.1009", "step")
    (row,) = fast_plans.rows_of([result | {"fast_cpu_s": [1.1, 0.5, 2.0], "fast_ms": 109.0, "share": None}])
    assert (row["fast / best"], row["misses"], row["budget"]) == ("1.0000", "time", "60.0% (smallest)")
