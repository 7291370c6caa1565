"""The commands that need no training: what they print and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pulp
import pytest

from benchmarks.policies import measure_profile
from pooch.ir import Link, Plan, Profile
from tests.cli.conftest import Command
from tests.toys import ladder

COMMANDS = (
    "profile",
    "plan",
    "run",
    "optimize",
    "exec",
    "show",
    "report",
    "export",
    "simulate",
    "compare",
    "max-batch",
    "pack",
    "devices",
    "doctor",
    "workloads",
    "reproduce",  # of an optional room, so it comes last
)


def test_help_lists_every_command_in_the_order_of_the_pipeline(pooch_command: Command) -> None:
    outcome = pooch_command("--help")
    assert outcome.code == 0
    places = [outcome.out.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_help_shows_the_command_to_begin_with_on_a_line_of_its_own(pooch_command: Command) -> None:
    lines = pooch_command("--help").out.splitlines()
    assert "pooch exec --budget 60% train.py" in [line.strip() for line in lines]
    assert not any("\\b" in line or "\b" in line for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(pooch_command: Command, name: str) -> None:
    outcome = pooch_command(name, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: pooch {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_uses_no_words_that_only_pooch_knows(pooch_command: Command, name: str) -> None:
    words = " ".join(pooch_command(name, "--help").out.split())
    assert "plainly" not in words
    assert "in-core" not in words


def test_help_and_saved_profiles_need_no_torch(profile_path: Path) -> None:
    code = (
        "import sys; from pooch.cli import main; "
        f"codes = [main(['--help']), main(['plan', {str(profile_path)!r}, '--budget', '60%', '--json'])]; "
        "print(codes, 'torch' in sys.modules, file=sys.stderr)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stderr.strip() == "[0, 0] False"


def test_help_alone_loads_next_to_nothing() -> None:
    code = (
        "import sys; from pooch.cli import main; main(['--help']); "
        "print([name for name in ('torch', 'pandas', 'pulp', 'rich') if name in sys.modules], file=sys.stderr)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stderr.strip() == "[]"


def test_python_minus_m_is_the_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pooch", "nonsense"], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("pooch: No such command")


def test_plan_writes_a_plan_and_says_what_it_is(pooch_command: Command, profile_path: Path, tmp_path: Path) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "60%", "-o", tmp_path / "out.json")
    assert outcome.code == 0
    plan = Plan.load(tmp_path / "out.json")
    assert plan.policy == "ilp"
    assert plan.status in outcome.out
    assert "keep" in outcome.out
    assert f"wrote {tmp_path / 'out.json'}" in outcome.out


def test_plan_and_compare_take_the_smallest_budget_in_words(pooch_command: Command, profile_path: Path) -> None:
    import pooch

    smallest = pooch.smallest_budget(Profile.load(profile_path))
    outcome = pooch_command("plan", profile_path, "--budget", "min", "--json")
    assert outcome.code == 0, outcome.error
    assert json.loads(outcome.out)["budget_bytes"] == smallest
    rows = pooch_command("compare", profile_path, "--budget", "min", "--policy", "ilp", "--json")
    of_step = pooch.smallest_budget(Profile.load(profile_path), region="step")
    assert [row["budget_bytes"] for row in json.loads(rows.out)] == [of_step]
    refused = pooch_command("plan", profile_path, "--budget", "60%", "--host-budget", "min")
    assert refused.code == 2
    assert "the host budget cannot be 'min'" in refused.error_line


def test_plan_as_json_is_one_document(pooch_command: Command, profile_path: Path, profile: Profile) -> None:
    outcome = pooch_command("plan", profile_path, "--budget", "60%", "--policy", "recompute_all", "--json")
    record = json.loads(outcome.out)
    assert record["policy"] == "recompute_all"
    assert record["keep"] + record["swap"] + record["recompute"] == len(profile.activations)
    assert record["budget_bytes"] == int(0.6 * profile.peak_bytes)
    assert outcome.error == ""


def test_simulate_predicts_what_the_plan_says(
    pooch_command: Command, profile_path: Path, plan_path: Path, plan: Plan, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    outcome = pooch_command("simulate", profile_path, plan_path, "--trace", trace, "--json")
    record = json.loads(outcome.out)
    assert record["peak_bytes"] == plan.predicted_peak_bytes
    assert record["step_ms"] == pytest.approx(plan.predicted_step_ms)
    assert json.loads(trace.read_text())["traceEvents"]


def test_compare_has_every_policy_under_every_budget(pooch_command: Command, profile_path: Path) -> None:
    outcome = pooch_command("compare", profile_path, "--budget", "100%", "--budget", "60%", "--json")
    rows = json.loads(outcome.out)
    assert {row["policy"] for row in rows} >= {"ilp", "keep_all", "recompute_all", "swap_all"}
    assert len({row["budget_bytes"] for row in rows}) == 2
    assert any(not row["feasible"] and row["minimum_bytes"] for row in rows)
    table = pooch_command("compare", profile_path, "--budget", "60%", "--policy", "ilp", "--policy", "keep_all")
    assert "needs" in table.out
    assert "swap_all" not in table.out


def test_compare_covers_the_whole_step_as_the_page_of_policies_does(pooch_command: Command) -> None:
    recorded = Path(__file__).parents[2] / "profiles" / "lstm-b32-cpu.json"
    asked = ("compare", recorded, "--budget", "60%", "--policy", "ilp", "--json")
    (cell,) = measure_profile(Profile.load(recorded), ["60%"], 30.0, policies=["ilp"]).cells
    (row,), (of_model,) = (json.loads(pooch_command(*asked, *more).out) for more in ((), ("--region", "model")))
    assert row["predicted_step_ms"] == cell.step_ms
    assert row != of_model


@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_show_prints_tables(pooch_command: Command, profile_path: Path, plan_path: Path, kind: str) -> None:
    outcome = pooch_command("show", profile_path if kind == "profile" else plan_path)
    assert outcome.code == 0
    assert ("activations by layer" if kind == "profile" else "decisions") in outcome.out


def test_show_draws_a_profile_and_a_plan(
    pooch_command: Command, profile_path: Path, plan_path: Path, tmp_path: Path
) -> None:
    assert pooch_command("show", profile_path, "--plot", tmp_path / "a.png").code == 0
    assert pooch_command("show", plan_path, "--profile", profile_path, "--plot", tmp_path / "b.svg").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_show_as_json_has_layers_and_decisions(
    pooch_command: Command, profile_path: Path, plan_path: Path, plan: Plan
) -> None:
    record = json.loads(pooch_command("show", plan_path, "--profile", profile_path, "--json").out)
    assert record["decisions"] == {str(value): choice for value, choice in plan.decisions.items()}
    swapped = sum(layer["swap_bytes"] for layer in record["layers"])
    assert swapped == sum(row.size_bytes for row in plan.choices if row.choice == "swap")


def test_workloads_lists_the_built_in_ones(pooch_command: Command) -> None:
    entries = {entry["name"]: entry for entry in json.loads(pooch_command("workloads", "--json").out)}
    assert {"resnet50", "gpt2", "unet3d", "lstm", "nmt"} < set(entries)
    assert entries["resnet50"]["sizes"]["pooch"]["settings"] == {"batch_size": 640}
    assert entries["gpt2"]["grows"] == ["batch_size", "sequence_length", "layers"]
    assert "resnet50" in pooch_command("workloads").out


def test_workloads_shows_the_sizes_of_one(pooch_command: Command) -> None:
    assert "unet3d@tflms-192" in pooch_command("workloads", "unet3d").out
    outcome = pooch_command("workloads", "zebra")
    assert outcome.code == 2
    assert "there is no built-in workload 'zebra'" in outcome.error


def test_version(pooch_command: Command) -> None:
    assert pooch_command("--version").out.startswith("pooch-planner ")
    assert pooch_command("-V").out == pooch_command("--version").out


def test_compare_writes_csv_and_a_picture_and_refuses_to_overwrite(
    pooch_command: Command, profile_path: Path, tmp_path: Path
) -> None:
    table, plot = tmp_path / "cells.csv", tmp_path / "pareto.svg"
    asked = ("compare", profile_path, "--budget", "60%", "--policy", "swap_all", "--csv", table, "--plot", plot)
    outcome = pooch_command(*asked)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-2:] == [f"wrote {table}", f"wrote {plot}"]
    assert table.read_text().startswith("budget_bytes,policy,feasible")
    assert "<svg" in plot.read_text()
    again = pooch_command(*asked)
    assert (again.code, "--force" in again.error) == (2, True)


def test_compare_sets_parameters_of_policies(pooch_command: Command, profile_path: Path) -> None:
    asked = ("compare", profile_path, "--budget", "60%", "--policy", "tflms", "--policy", "swap_all", "--json")
    plain = json.loads(pooch_command(*asked).out)
    changed = json.loads(pooch_command(*asked, "--policy-option", "tflms.n_tensors=1").out)
    assert [record["policy"] for record in changed] == ["tflms(n_tensors=1)", "swap_all"]
    assert plain[0]["feasible"]
    assert not changed[0]["feasible"], "one tensor is not enough"
    assert changed[1]["predicted_step_ms"] == plain[1]["predicted_step_ms"]


def test_ranks_slow_the_link_and_a_host_budget_bounds_it(pooch_command: Command, profile_path: Path) -> None:
    asked = ("compare", profile_path, "--budget", "60%", "--policy", "swap_all", "--json")
    (alone,) = json.loads(pooch_command(*asked).out)
    (crowded,) = json.loads(pooch_command(*asked, "--ranks", "4096").out)
    assert crowded["predicted_step_ms"] > alone["predicted_step_ms"]
    plan = ("plan", profile_path, "--budget", "60%", "--policy", "swap_all", "--json")
    assert json.loads(pooch_command(*plan, "--ranks", "4096").out)["predicted_step_ms"] == pytest.approx(
        crowded["predicted_step_ms"]
    )
    for ranks in ("0", str(2**20 + 1), "9" * 400):
        assert pooch_command(*plan, "--ranks", ranks).code == 2
    (bounded,) = json.loads(pooch_command(*asked, "--host-budget", str(alone["host_bytes"])).out)
    assert bounded["host_bytes"] == alone["host_bytes"] > 0


def test_compare_needs_a_workload_to_measure(pooch_command: Command, profile_path: Path) -> None:
    outcome = pooch_command("compare", profile_path, "--budget", "60%", "--batch-size", "2")
    assert outcome.code == 2
    assert "--measure WORKLOAD" in outcome.error_line


def test_ctrl_c_while_planning_writes_the_best_plan_so_far(
    pooch_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a step that has to be searched
    slow = Link("toy tier", 0.1, 0.1, 8.0, 8.0, full_duplex=False, in_compute_share=0.5)
    ladder(5, size_bytes=64, link=slow).save(tmp_path / "p.json")

    def interrupt(self: object, problem: object) -> None:
        raise KeyboardInterrupt

    # WHEN Ctrl-C is pressed while the solver runs
    monkeypatch.setattr(pulp.HiGHS, "callSolver", interrupt)
    outcome = pooch_command("plan", tmp_path / "p.json", "--budget", "80%", "-o", tmp_path / "plan.json")
    # THEN there is a plan that says so
    assert outcome.code == 0
    assert "interrupted: this is the best plan found so far" in outcome.out
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.predicted_peak_bytes <= plan.budget_bytes
