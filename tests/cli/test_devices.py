"""`pooch devices --all`, `--measure`, and `pooch profile --device-model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pooch.devices import find_device, read_catalogue
from pooch.ir import Profile
from tests.cli.conftest import Command

SMALL = ("lstm", "--batch-size", 2, "--set", "width=32", "--set", "sequence_length=16")


@pytest.fixture(autouse=True)
def own_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "pooch" / "devices.toml"


def test_all_lists_the_catalogue_with_sources(pooch_command: Command) -> None:
    told = pooch_command("devices", "--all")
    assert told.code == 0
    assert all(name in told.out for name in ("V100-PCIe", "V100-NVLink", "H200", "RTX-5090", "recalled", "data sheet"))
    records = json.loads(pooch_command("devices", "--all", "--json").out)
    assert next(each for each in records if each["name"] == "V100-PCIe")["tflops"]["float32"] == 14.0


def test_a_step_is_modelled_for_a_device_by_name(pooch_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    told = pooch_command("profile", *SMALL, "--mode", "fake", "--device-model", "v100-pcie", "-o", path)
    assert told.code == 0
    assert "modelled" in told.out
    profile = Profile.load(path)
    assert (profile.mode, profile.device.modelled, profile.device.name) == (
        "fake",
        True,
        find_device("V100-PCIe").title,
    )
    assert pooch_command("show", path, "--plot", tmp_path / "p.png").code == 0


def test_a_bad_device_model_is_told(pooch_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    told = pooch_command("profile", *SMALL, "--device-model", "V10", "-o", path)
    assert told.code == 2
    assert "did you mean" in told.error_line
    told = pooch_command("profile", *SMALL, "--device-model", "H100", "--mode", "run", "-o", path)
    assert told.code == 2
    assert not path.exists()


def test_this_machine_is_measured_and_added(pooch_command: Command, own_catalogue: Path, tmp_path: Path) -> None:
    told = pooch_command("devices", "--measure", "--device", "cpu", "--name", "mine", "--json")
    assert told.code == 0
    model = read_catalogue(own_catalogue)["mine"]
    assert model.kind == "cpu"
    assert 0 < model.tflops["float32"] < 100
    assert 0 < model.memory_gb_per_s < 10000
    assert "measured here" in model.source
    path = tmp_path / "p.json"
    assert pooch_command("profile", *SMALL, "--device-model", "mine", "-o", path).code == 0
    assert Profile.load(path).device.modelled


@pytest.mark.parametrize("arguments", [("--all", "--measure"), ("--device", "cpu"), ("--measure", "--device", "tpu")])
def test_wrong_usage(pooch_command: Command, arguments: tuple[str, ...]) -> None:
    assert pooch_command("devices", *arguments).code == 2


def test_one_of_several_modelled_ranks(pooch_command: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = [f"--set={each}" for each in ("layers=2", "width=64", "heads=4", "vocabulary=500", "sequence_length=32")]
    path = tmp_path / "p.json"
    found = pooch_command("profile", "gpt2", *sizes, "--device-model=H100", "--ranks=8", "--json", "-o", path)
    ranks = json.loads(found.out)["ranks"]
    assert (ranks["ranks"], ranks["kind"], ranks["units"], ranks["modelled"]) == (8, "fsdp", 3, True)
    assert ranks["fits_without_a_plan"]
    assert 0 < ranks["waiting_ms"] < ranks["collective_ms"] + 1
    shown = pooch_command("plan", path, "--budget", "80GB")
    assert "a plan for this" in shown.out
    refused = pooch_command("profile", "gpt2", "--sharding=ddp", "-o", tmp_path / "q.json")
    assert refused.code == 2
    assert refused.error_line == "pooch: --sharding, --unit and --link-gbps are for several ranks: add --ranks"
    unknown = pooch_command("profile", "gpt2", "--device-model=RTX-4090", "--ranks=2", "-o", tmp_path / "q.json")
    assert unknown.code == 2
    assert "give --link-gbps" in unknown.error_line
