"""The table of layouts: made of what is stored, and of what is packed now."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.layouts import main, rows_of

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks/results/layouts.json").read_text())


def test_the_stored_table_is_made_of_the_stored_results() -> None:
    assert STORED["rows"] == rows_of(STORED["results"])


def test_every_stored_arena_holds_its_bound_and_its_budget() -> None:
    for result in STORED["results"]:
        assert all(run["arena_bytes"] >= result["bound_bytes"] for run in result["runs"])
        if "fitted" in result:
            assert result["fitted"]["total_bytes"] <= result["plan"]["budget_bytes"]
            assert result["fitted"]["step_ms"] >= result["fitted"]["lower_bound_ms"]


def test_every_recorded_profile_is_in_the_table() -> None:
    assert {result["workload"] for result in STORED["results"]} == {p.stem for p in (ROOT / "profiles").glob("*.json")}


def test_a_profile_is_measured_into_rows(tmp_path: Path) -> None:
    arguments = ["--workloads", "lstm-b32-cpu", "--effort", "fast", "--seconds", "0.1", "--output", str(tmp_path)]
    assert main(["--profiles", str(ROOT / "profiles"), *arguments]) == 0
    rows = json.loads((tmp_path / "layouts.json").read_text())["rows"]
    assert [row["budget"].split()[0] for row in rows] == ["in-core", "80%", "60%", "45%"]
    assert all(float(row["ours"].split()[0]) < 1.001 for row in rows if row["budget"] == "in-core")
