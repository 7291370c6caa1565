"""An ONNX file on the command line: optimized and exported, profiled, planned and run; every refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from tests.cli.conftest import Command
from tests.onnx.support import export


class Layers(nn.Module):
    """Wide enough that its activations are most of its memory at a large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return self.head(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("onnx") / "layers.onnx"
    return export(Layers(), (torch.randn(2, 64),), path, dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.slow
def test_optimized_and_exported(pooch_command: Command, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "trained.onnx"
    given = ("--batch-size", 1024, "--budget", "75%", "--steps", 2, "--check", "--json", "--export", target)
    outcome = pooch_command("optimize", model, *given)
    assert outcome.code == 0, outcome.error
    record = json.loads(outcome.out)
    assert record["training"]["kept"] is True
    assert record["training"]["bitwise_equal"] is True
    assert record["training"]["swapped_out_bytes"] + record["training"]["recomputed_ops"] > 0
    assert record["export"]["same"] is True
    assert record["export"]["largest_difference"] <= record["export"]["tolerance"] * record["export"]["largest_output"]
    assert onnx.load(target).graph.input[0] == onnx.load(model).graph.input[0]
    again = pooch_command("optimize", model, "--budget", "75%", "--export", target)
    assert again.code == 2
    assert "--force" in again.error_line


@pytest.mark.slow
def test_a_forward_pass_is_packed_and_a_training_step_if_asked_for(
    pooch_command: Command, model: Path, tmp_path: Path
) -> None:
    given = ("--batch-size", 256, "--time-limit", 0.2, "--json")
    answers = {}
    for name, more in (("inference", ()), ("asked", ("--inference",)), ("training", ("--training",))):
        outcome = pooch_command("pack", model, *given, *more)
        assert outcome.code == 0, outcome.error
        answers[name] = json.loads(outcome.out)
        answers[name].pop("seconds")
    assert answers["inference"] == answers["asked"]
    assert answers["inference"]["verified"] is True
    rows = 256 * 64 * 4
    assert 2 * rows <= answers["inference"]["arena_bytes"] < 4 * rows  # a layer's input and output
    assert answers["training"]["arena_bytes"] > 6 * rows
    path = tmp_path / "p.json"
    assert pooch_command("profile", model, "--batch-size", 256, "-o", path, "--repeats", 1).code == 0
    saved = json.loads(pooch_command("pack", path, "--inference", *given[2:]).out)
    assert saved["bound_bytes"] == answers["inference"]["bound_bytes"]


def test_a_model_that_cannot_be_packed_is_told_in_one_line(pooch_command: Command, model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((model, "--inference", "--training"), "exclude each other"),
        ((model, "--profile", model), "is no plan"),
        ((model, "--seed", 3), "--seed"),
        ((model, "--set", "nonsense"), "nonsense"),
        ((tmp_path / "none.onnx",), "none.onnx"),
        ((tmp_path / "blocks.csv", "--batch-size", 4), "is no model"),
        ((tmp_path / "p.json", "--training"), "is no model"),
    ):
        outcome = pooch_command("pack", *arguments)
        assert outcome.code in (1, 2)
        assert words in outcome.error_line
        assert "unexpected" not in outcome.error_line


@pytest.mark.slow
def test_profiled_planned_and_run(pooch_command: Command, model: Path, tmp_path: Path) -> None:
    profile, plan, target = tmp_path / "p.json", tmp_path / "plan.json", tmp_path / "trained.onnx"
    size = ("--batch-size", 1024)
    assert pooch_command("profile", model, *size, "-o", profile, "--repeats", 1).code == 0
    assert pooch_command("plan", profile, "--budget", "80%", "-o", plan).code == 0
    outcome = pooch_command("run", model, *size, "--plan", plan, "--check", "--steps", 1, "--export", target)
    assert outcome.code == 0, outcome.error
    assert "yes, bitwise" in outcome.out
    line = next(line for line in outcome.out.splitlines() if line.startswith("wrote "))
    assert "of the largest output (tolerance: 1e-04)" in line


def test_its_forward_pass_without_gradients_is_packed(pooch_command: Command, model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    options = ("--batch-size", 32, "--mode", "fake", "-o", profile)
    assert pooch_command("profile", model, *options).code == 0
    outcome = pooch_command("pack", profile, "--inference", "--json")
    assert outcome.code == 0, outcome.error
    answer = json.loads(outcome.out)
    layer_bytes = 4 * 32 * 64
    assert answer["bound_bytes"] == 2 * layer_bytes, "what a layer reads and what it makes, of all layers"
    assert answer["arena_bytes"] == answer["bound_bytes"]
    assert answer["verified"] is True


def test_an_export_that_differs_is_an_error(
    pooch_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pooch.onnx import exporting

    run_file = exporting._run_file
    monkeypatch.setattr(
        exporting, "_run_file", lambda *a, **b: [[each + 1 for each in run] for run in run_file(*a, **b)]
    )
    outcome = pooch_command("run", model, "--steps", 1, "--export", tmp_path / "trained.onnx")
    assert outcome.code == 1
    assert "gives different outputs in onnxruntime" in outcome.error_line
    assert "wrote" in outcome.out


@pytest.mark.parametrize(("name", "code"), [("trained.pt", 2), ("no/such/folder/trained.onnx", 2), ("", 2)])
def test_names_that_cannot_be_written(
    pooch_command: Command, model: Path, tmp_path: Path, name: str, code: int
) -> None:
    target = tmp_path / name if name else model  # the model itself
    outcome = pooch_command("run", model, "--export", target, "--force")
    assert outcome.code == code
    assert str(target) in outcome.error_line


def test_a_broken_file_is_one_line_and_exit_code_one(pooch_command: Command, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(model.read_bytes()[:200])
    outcome = pooch_command("profile", broken, "-o", tmp_path / "p.json")
    assert outcome.code == 1
    assert "truncated" in outcome.error_line
