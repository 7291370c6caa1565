"""The table of runs without a plan: made of what is stored, of the profiles that are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.online import BUDGETS, RULES, actions_of, measure, rows_of
from benchmarks.policies import digest_of
from tests.toys import chain

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "benchmarks/results/online.json").read_text())


def test_the_stored_tables_are_made_of_the_stored_results() -> None:
    assert STORED["rows"] == rows_of(STORED["results"])
    assert STORED["more"] == {"What the runs did": actions_of(STORED["results"])}


def test_the_stored_results_are_of_all_profiles_at_all_budgets() -> None:
    digests = {result["profile_digest"] for result in STORED["results"]}
    assert digests == {digest_of(path) for path in (ROOT / "profiles").glob("*.json")}
    assert len(STORED["results"]) == len(digests) * len(BUDGETS)
    for result in STORED["results"]:
        assert set(result["runs"]) == set(RULES)
        assert all(run["step_ms"] >= result["plan_ms"] for run in result["runs"].values()), "a run beats the plan"


def test_a_profile_without_stored_plans_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    chain(12, size_bytes=1 << 20).save(path)
    results = measure(path, ["60%", "10%"], 20)
    assert results[0]["budget"] == "60%"
    assert results[1]["budget"].endswith("(smallest)")
    for result in results:
        assert result["plan_ms"] <= result["runs"]["online"]["step_ms"] + 1e-6
    told = rows_of(results)
    assert told[0]["DTR"].endswith("%")


def test_a_run_over_its_budget_is_told_by_what_it_needs() -> None:
    result = next(iter(STORED["results"]))
    over = {**result["runs"]["DTR"], "over_bytes": 1, "needs_bytes": result["in_core_peak_bytes"] // 2}
    (row,) = rows_of([{**result, "runs": {"DTR": over}}])
    assert row["DTR"] == "needs 50.0%"
    assert actions_of([{**result, "runs": {"DTR": over}}]) == []
    assert result["runs"]["DTR"]["step_ms"] > result["in_core_ms"] or pytest.fail("nothing was lost")
