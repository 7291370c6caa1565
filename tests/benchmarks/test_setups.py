"""The table of training scripts: what is stored, what is concluded from it, and the counter behind its peaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.setups import __main__ as command
from benchmarks.setups.catalogue import SETUPS
from benchmarks.setups.counting import preloading
from benchmarks.setups.outcome import budget_of, outcome_of, row_of
from benchmarks.setups.setup import Setup

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SETUP = Setup("made-up", "nothing", lambda way: None)


def trained(peaks: list[int], values: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    steps = [{"ms": 2.0, "peak_bytes": peak, "live_bytes": 20} for peak in peaks]
    return {"values": values, "steps": steps, "lines": 1, "pooch": [], "warnings": [], **more}


def outcome(values: dict[str, list[str]], again: dict[str, list[str]], peak: int = 70) -> dict[str, Any]:
    summary = {"steps_on_plan": 3, "steps_online": 2, "steps_in_core": 1}
    plain = [{"trained": trained([100, 120], {"loss": ["0x1p0"]})}]
    governed = [{"trained": trained([peak], values, pooch=[summary]), "plain again": trained([100], again)}]
    return outcome_of(SETUP, 90, plain, governed).as_data()


def test_the_budget_lies_between_what_stays_and_the_highest_peak_of_any_rank() -> None:
    ranks = [{"trained": trained([100, 120], {})}, {"trained": trained([110, 90], {})}]
    assert budget_of(SETUP, ranks) == 90


def test_a_setup_with_the_same_bits_within_its_budget_is_told_as_such() -> None:
    row = row_of(outcome({"loss": ["0x1p0"]}, {"loss": ["0x1p0"]}))
    assert (row["same bits"], row["within"], row["plan/online/in-core"], row["time"]) == ("yes", "yes", "3/2/1", "1.00")


def test_another_bit_a_missing_value_and_a_peak_over_the_budget_are_told() -> None:
    assert "no: with Pooch, loss" in str(row_of(outcome({"loss": ["0x2p0"]}, {"loss": ["0x1p0"]}))["same bits"])
    assert "no: plainly after Pooch, loss" in str(row_of(outcome({"loss": ["0x1p0"]}, {}))["same bits"])
    assert row_of(outcome({"loss": ["0x1p0"]}, {"loss": ["0x1p0"]}, peak=91))["within"] == "no"


def test_a_run_that_failed_counts_as_neither() -> None:
    failed = outcome_of(SETUP, 90, [{"trained": trained([100], {})}], None, "it crashed").as_data()
    assert not failed["same_bits"]
    assert not failed["is_within"]
    assert row_of(failed)["within"] == "no"


def test_a_setup_by_exec_runs_the_same_script_without_a_line_of_pooch() -> None:
    plain, by_exec = SETUPS["plain-loop"], SETUPS["plain-loop-exec"]
    assert by_exec.train is plain.train
    assert command._command(by_exec, None)[1:] == ["-m", "benchmarks.setups.child", "plain-loop-exec"]
    assert command._command(by_exec, 99)[1:6] == ["-m", "pooch", "exec", "--budget", "99"]
    assert command._command(plain, 99)[-1] == "99"
    one = [{"trained": trained([100], {})}]
    assert outcome_of(by_exec, 90, one, None).lines == 0
    assert outcome_of(plain, 90, one, None).lines == 1


def test_the_catalogue_is_as_large_as_its_page_says() -> None:
    assert len(SETUPS) >= 24
    assert {setup.needs for setup in SETUPS.values()} == {
        "",
        "transformers",
        "trl",
        "accelerate",
        "lightning",
        "monai",
        "ignite",
    }


@pytest.mark.cpu
def test_the_counter_sees_what_tensors_take_and_nothing_else() -> None:
    script = """
import json, torch
from benchmarks.setups.counting import LiveBytes
counter = LiveBytes()
kept = torch.empty(1000)
counter.begin_peak()
other = bytearray(10**6)
gone = torch.empty(500, dtype=torch.float64)
del gone
torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
print(json.dumps([kept.nbytes, counter.live_bytes, counter.peak_bytes]))
"""
    try:
        environment = preloading({"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)})
    except RuntimeError as error:
        pytest.skip(str(error))
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    kept_bytes, live_bytes, peak_bytes = json.loads(finished.stdout)
    assert live_bytes == kept_bytes
    assert peak_bytes == kept_bytes + 500 * 8


def test_the_page_is_what_was_measured() -> None:
    stored = RESULTS / "setups.json"
    if not stored.exists():
        pytest.skip("not measured yet: python -m benchmarks.setups")
    document = json.loads(stored.read_text())
    assert document["rows"] == [row_of(each) for each in document["results"]]
    assert (ROOT / command.PAGE).read_text() == command.page(RESULTS)
