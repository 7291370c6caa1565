"""The table of layouts: made of what is stored, and of what is packed now."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.layouts import inference_rows_of, main, rows_of

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks/results/layouts.json").read_text())

STORED_PASSES = json.loads((ROOT / "benchmarks/results/layouts-inference.json").read_text())


def test_the_stored_table_is_made_of_the_stored_results() -> None:
    assert STORED["rows"] == rows_of(STORED["results"])
    assert STORED_PASSES["rows"] == inference_rows_of(STORED_PASSES["results"])


def test_every_stored_arena_holds_its_bound_and_its_budget() -> None:
    for result in [*STORED["results"], *STORED_PASSES["results"]]:
        assert all(run["arena_bytes"] >= result["bound_bytes"] for run in result["runs"])
        if "fitted" in result:
            assert result["fitted"]["total_bytes"] <= result["plan"]["budget_bytes"]
            assert result["fitted"]["step_ms"] >= result["fitted"]["lower_bound_ms"]


def test_every_recorded_profile_is_in_the_table() -> None:
    recorded = {path.stem for path in (ROOT / "profiles").glob("*.json")}
    assert {result["workload"] for result in STORED["results"]} == recorded
    assert [result["workload"] for result in STORED_PASSES["results"]] == sorted(recorded)


def test_a_profile_is_measured_into_rows(tmp_path: Path) -> None:
    arguments = ["--workloads", "lstm-b32-cpu", "--effort", "fast", "--seconds", "0.1", "--output", str(tmp_path)]
    assert main(["--profiles", str(ROOT / "profiles"), *arguments]) == 0
    rows = json.loads((tmp_path / "layouts.json").read_text())["rows"]
    assert [row["budget"].split()[0] for row in rows] == ["in-core", "80%", "60%", "45%"]
    assert all(float(row["ours"].split()[0]) < 1.001 for row in rows if row["budget"] == "in-core")
    (forward,) = json.loads((tmp_path / "layouts-inference.json").read_text())["results"]
    assert forward["bound_bytes"] < forward["step_bytes"]
    assert (
        main(["--profiles", str(ROOT / "profiles"), *arguments[:2], "--inference", "--output", str(tmp_path / "one")])
        == 0
    )
    assert [path.name for path in sorted((tmp_path / "one").iterdir())] == [
        f"layouts-inference.{e}" for e in ("json", "md")
    ]
