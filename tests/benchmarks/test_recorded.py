"""What is stored was recorded with everything that the figures need: samples, enough turns, hook costs in profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import does_not_fit, main_job
from benchmarks.samples import FEWEST_TURNS, of_kind
from benchmarks.tables import LAYOUT
from pooch.ir import Profile
from pooch.ir.consistency import check_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROFILES = sorted((ROOT / "profiles").glob("*.json"))


def stored(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def test_the_table_of_the_main_job_is_what_its_samples_say() -> None:
    document = stored("main-job-cpu")
    assert document["layout"] == LAYOUT
    assert document["rows"] == main_job.rows_of(document["results"])
    assert document["more"] == main_job.more_of(document["results"])


def test_every_timed_step_of_the_main_job_has_its_processor_time_and_page_faults() -> None:
    for result in stored("main-job-cpu")["results"]:
        fewest = FEWEST_TURNS if result["budget"] == "60%" else 4
        for kind in ("plain", "planned"):
            for what in ("wall_ms", "user_s", "system_s", "minor_faults"):
                assert len(of_kind(result["samples"], kind, what)) >= fewest, (result["workload"], result["budget"])


def test_the_table_of_steps_that_do_not_fit_is_what_was_seen() -> None:
    document = stored("does-not-fit-cpu")
    assert document["rows"] == [does_not_fit.row_of(found) for found in document["results"]]
    assert {found["workload"] for found in document["results"]} == set(does_not_fit.BUDGETS)
    for found in document["results"]:
        assert found["plain_exit_code"] == 1
        assert found["planned_exit_code"] == 0
        training = found["planned"]["training"]
        assert training["measured_peak_bytes"] <= found["budget_bytes"] < found["planned"]["plan"]["in_core_peak_bytes"]
        assert training["bitwise_equal"] is True


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_that_was_measured_on_a_cpu_carries_hook_costs_and_is_consistent(path: Path) -> None:
    profile = Profile.load(path)
    assert check_profile(profile) is None
    if profile.device.kind == "cpu" and not profile.device.modelled:
        assert profile.hooks.op_ms > 0, "recorded without hook costs: main_job --keep-profiles profiles"
        assert profile.hooks.copy_ms > 0
        assert profile.hooks.replay_ms >= 0


def test_there_is_a_recorded_profile_of_every_workload_of_the_main_job() -> None:
    measured = [Profile.load(path) for path in PROFILES]
    assert set(main_job.WORKLOADS) <= {profile.workload for profile in measured if not profile.device.modelled}
