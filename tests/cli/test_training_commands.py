"""`profile`, `run`, `optimize` and `devices` on a small model, end to end; the mechanism has to fire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pooch.ir import Plan, Profile
from tests.cli.conftest import Command

USER_FILE = """
import torch
from pooch import Workload

def make(batch_size=512, device="cpu", layers=6, width=256):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks, torch.nn.Dropout(0.1)).to(device)
    data = torch.randn(batch_size, width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda: model(data).square().mean(), optimizer, "small", batch_size)
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(USER_FILE)
    return f"{path}:make"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "fake"])
def test_optimize_keeps_what_it_promises(pooch_command: Command, workload: str, mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    given = (workload, "--budget", "80%", "--check", "--json", "--mode", mode)
    outcome = pooch_command("optimize", *given, "-o", folder)
    assert outcome.code == 0, outcome.error
    record = json.loads(outcome.out)
    training = record["training"]
    assert training["kept"] is True
    assert training["bitwise_equal"] is True
    assert training["measured_peak_bytes"] <= training["budget_bytes"] < record["profile"]["peak_bytes"]
    assert training["swapped_out_bytes"] + training["recomputed_ops"] > 0
    assert training["mismatches"] == 0
    assert Profile.load(folder / "profile.json").workload == "small"
    assert Profile.load(folder / "profile.json").mode == ("run" if mode == "auto" else "fake")
    assert Plan.load(folder / "plan.json").budget_bytes == training["budget_bytes"]
    again = pooch_command("optimize", workload, "--budget", "80%", "-o", folder)
    assert again.code == 2
    assert "--force" in again.error_line


@pytest.mark.usefixtures("without_floor")  # other tests of the process may hold tensors
@pytest.mark.slow
def test_run_on_an_arena(pooch_command: Command, workload: str, tmp_path: Path) -> None:
    profile, plan = tmp_path / "p.json", tmp_path / "plan.json"
    assert pooch_command("profile", workload, "-o", profile).code == 0
    assert pooch_command("plan", profile, "--budget", "85%", "-o", plan).code == 0
    for given in (("--plan", plan, "--check"), ()):
        outcome = pooch_command("run", workload, *given, "--arena", "--json")
        assert outcome.code == 0, outcome.error
        record = json.loads(outcome.out)
        assert record["kept"] is True
        assert record["arena_difference"] is None
        assert record["arena_share_placed"] > 0.99
        assert record["arena_bytes"] >= record["arena_bound_bytes"] > 2**20
    shown = pooch_command("run", workload, "--arena")
    assert "of requests at their place" in " ".join(shown.out.split())


@pytest.mark.slow
def test_profile_plan_and_run_one_after_the_other(pooch_command: Command, workload: str, tmp_path: Path) -> None:
    profile, plan = tmp_path / "p.json", tmp_path / "plan.json"
    assert pooch_command("profile", workload, "-o", profile, "--set", "layers=4").code == 0
    assert pooch_command("plan", profile, "--budget", "85%", "-o", plan).code == 0
    outcome = pooch_command("run", workload, "--plan", plan, "--check", "--steps", 2, "--set", "layers=4")
    assert outcome.code == 0, outcome.error
    assert "yes, bitwise" in outcome.out
    other = pooch_command("run", workload, "--plan", plan)  # six layers, not four
    assert other.code == 1
    assert "another model" in other.error_line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the step left the planned path")
def test_a_run_with_another_batch_size_than_the_plan_keeps_no_promise(
    pooch_command: Command, workload: str, tmp_path: Path
) -> None:
    profile, plan = tmp_path / "p.json", tmp_path / "plan.json"
    assert pooch_command("profile", workload, "-o", profile, "--set", "layers=4").code == 0
    assert pooch_command("plan", profile, "--budget", "85%", "-o", plan).code == 0
    outcome = pooch_command("run", workload, "--plan", plan, "--set", "layers=4", "--batch-size", 8, "--steps", 2)
    assert outcome.code == 1
    assert "2 of 2 steps were not the planned step" in outcome.error_line
    assert "batch size" in outcome.error_line
    assert "unknown, as steps left the plan" in outcome.out
    asked = ("--plan", plan, "--set", "layers=4", "--batch-size", 8, "--steps", 2, "--json")
    record = json.loads(pooch_command("run", workload, *asked).out)
    assert record["kept"] is False
    assert record["within_budget"] is None
    assert record["steps_off_plan"] == 2


@pytest.mark.usefixtures("without_floor")  # other tests of the process may hold tensors
@pytest.mark.slow
def test_compare_measures_the_plans_that_there_are(pooch_command: Command, workload: str, tmp_path: Path) -> None:
    # GIVEN a profile, and two policies with a plan and one without
    profile, table = tmp_path / "p.json", tmp_path / "t.csv"
    assert pooch_command("profile", workload, "-o", profile, "--set", "layers=4").code == 0
    asked = ["compare", profile, "--budget", "85%", "--measure", workload, "--set", "layers=4", "--steps", 2]
    asked += ["--policy", "ilp", "--policy", "swap_all", "--policy", "keep_all"]
    # WHEN they are measured
    outcome = pooch_command(*asked, "--csv", table, "--json")
    # THEN each plan has its peak beside the predicted one, and a time
    assert outcome.code == 0, outcome.error
    first, second, third = json.loads(outcome.out)
    for record in (first, second):
        assert 0 < record["measured_peak_bytes"] <= record["budget_bytes"]
        assert record["measured_peak_bytes"] == pytest.approx(record["predicted_peak_bytes"], rel=0.02)
        assert record["measured_step_ms"] > 0
    assert "measured_peak_bytes" not in third
    assert "measured_peak_bytes" in table.read_text().splitlines()[0]
    # AND another model than that of the profile is refused in one line
    other = pooch_command(*[each if each != "layers=4" else "layers=5" for each in asked])
    assert other.code == 1
    assert "plan" in other.error_line


@pytest.mark.slow
def test_running_without_a_plan_is_plain_training(pooch_command: Command, workload: str) -> None:
    record = json.loads(pooch_command("run", workload, "--steps", 1, "--json").out)
    assert record["measured_peak_bytes"] > 0
    assert record["budget_bytes"] is None


@pytest.mark.slow
def test_an_infeasible_budget_writes_nothing(pooch_command: Command, workload: str, tmp_path: Path) -> None:
    outcome = pooch_command("optimize", workload, "--budget", "1%", "-o", tmp_path / "made")
    assert outcome.code == 3
    assert "smallest feasible budget" in outcome.error_line
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_devices_measures_what_is_here(pooch_command: Command) -> None:
    found = json.loads(pooch_command("devices", "--json").out)
    assert "cpu" in {device["kind"] for device in found}
    assert all(device["out_bytes_per_ms"] > 0 and device["in_bytes_per_ms"] > 0 for device in found)
    assert "swap tier" in pooch_command("devices").out
