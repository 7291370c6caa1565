"""`pooch export`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from pooch.ir import Plan
from tests.cli.conftest import Command


@pytest.mark.cpu
def test_the_command_writes_what_is_predicted_and_what_is_measured(pooch_command: Command, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("p.json", "plan.json", "a.pickle", "b.pickle")}
    assert pooch_command("profile", "lstm@small", "--mode", "run", "-o", paths["p.json"]).code == 0
    planned = pooch_command(
        "plan", paths["p.json"], "--budget", "75%", "--region", "step", "--policy", "ilp_swap", "-o", paths["plan.json"]
    )
    assert planned.code == 0
    predicted = pooch_command(
        "export", paths["plan.json"], "--profile", paths["p.json"], "--memory-viz", paths["a.pickle"], "--json"
    )
    assert predicted.code == 0
    assert json.loads(predicted.out)["peak_bytes"] == Plan.load(paths["plan.json"]).predicted_peak_bytes
    measured = pooch_command("export", paths["plan.json"], "--measure", "lstm@small", "--memory-viz", paths["b.pickle"])
    assert measured.code == 0
    assert "measured" in measured.out
    (events,) = pickle.loads(paths["b.pickle"].read_bytes())["device_traces"]
    assert {"kept", "swapped"} <= {event.get("category") for event in events}
    assert pooch_command("export", paths["plan.json"], "--memory-viz", tmp_path / "c.pickle").code == 2
    assert pooch_command("export", paths["plan.json"], "--memory-viz", paths["a.pickle"]).code == 2
