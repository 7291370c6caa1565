"""`pooch max-batch` and `pooch reproduce`: a small network of the user's own, really profiled, planned and trained."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from pooch.api import fake_profiling
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.errors import InfeasibleBudget
from pooch.ir import Link
from pooch.torchtools.memory_trace import live_bytes
from pooch.workloads import WorkloadFactory
from tests.cli.conftest import Command

NETWORK = """
import torch
import pooch

def make(batch_size=4, device="cpu", layers=6, width=64):
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)]
    model = torch.nn.Sequential(*parts).to(device)
    data = torch.randn(batch_size * 64, width)
    return pooch.Workload(model, lambda: model(data).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
"""
BUDGET = 1_200_000


@pytest.fixture
def network(tmp_path: Path) -> str:
    (tmp_path / "network.py").write_text(NETWORK)
    return f"{tmp_path / 'network.py'}:make"


@pytest.fixture(autouse=True)
def _known_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the link takes seconds, and says nothing about sizes."""
    monkeypatch.setattr(fake_profiling, "measure_device_link", lambda device: Link("a known tier", 0.1, 0.1, 1e6, 1e6))


def fits(network: str, size: int) -> bool:
    built = WorkloadFactory(network, batch_size=size)
    try:
        plan(profile_workload(built, mode="fake"), BUDGET, region="step")
    except InfeasibleBudget:
        return False
    return True


def test_it_finds_the_largest_batch_of_a_network_and_trains_it(
    pooch_command: Command, network: str, tmp_path: Path
) -> None:
    picture = tmp_path / "curve.png"
    gc.collect()
    left_bytes = live_bytes(torch.device("cpu"))  # of other tests in this process; a measured peak counts them
    outcome = pooch_command(
        "max-batch", network, "--budget", BUDGET, "--measure", "--steps", 1, "--points", 2,
        "--start", 4, "--plot", picture, "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.error
    found = json.loads(outcome.out)
    assert fits(network, found["largest"])
    assert not fits(network, found["largest"] + 1)
    assert found["largest"] > found["in_core_largest"] >= 1
    assert found["refused"] == found["largest"] + 1
    assert found["times"] == "ops measured"
    assert found["verdict"].startswith(f"batch_size {found['largest']} fits into 1.14 MiB under a plan, ")
    assert [point["batch_size"] for point in found["curve"]][-1] == found["largest"]
    plain, planned = found["measured"]
    assert (plain["size"], plain["planned"]) == (found["in_core_largest"], False)
    assert (planned["size"], planned["planned"]) == (found["largest"], True)
    assert planned["peak_bytes"] <= BUDGET + left_bytes
    assert planned["within_budget"] is (planned["peak_bytes"] <= BUDGET)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_any_setting_can_grow(pooch_command: Command, network: str) -> None:
    outcome = pooch_command(
        # cuBLAS takes a workspace in each of the two passes, 64 MiB under the tests' CUBLAS_WORKSPACE_CONFIG.
        "max-batch", network, "--budget", 64 * 2**20 + BUDGET, "--grow", "layers", "--batch-size", 1, "--points", 2,
        "--most", 12, "--policy", "swap_opt", "--device-model", "V100-PCIe",
    )  # fmt: skip
    assert outcome.code == 0, outcome.error
    assert "largest layers" in outcome.out
    assert outcome.out.startswith("layers 12 fits into 65.14 MiB without Pooch, and no larger one was tried\n")
    assert "no op was run; the times are those of a model of the device" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--budget", "60%"), 2, "nothing is known yet of what"),
        (("--budget", "2KB", "--most", "1", "--device-model", "M40"), 3, "no plan of policy 'ilp' fits into 1.95 KiB"),
        (("--budget", "1MB", "--batch-size", "3"), 2, "batch_size is the setting that grows"),
        (("--budget", "1MB", "--device-model", "V100-PCIe", "--measure"), 2, "only modelled cannot be measured"),
        (("--budget", "1MB", "--device-model", "V101"), 2, "there is no device 'V101'"),
        (("--budget", "1MB", "--grow", "depth"), 2, "does not take 'depth'"),
        (("--budget", "1MB", "--plot", "curve.doc"), 2, "cannot draw 'curve.doc'"),
    ],
)
def test_bad_input_is_told_in_one_line(
    pooch_command: Command, network: str, arguments: tuple[str, ...], code: int, told: str
) -> None:
    outcome = pooch_command("max-batch", network, *arguments)
    assert outcome.code == code
    assert told in outcome.error_line


def test_a_built_in_workload_grows_by_what_it_names(pooch_command: Command) -> None:
    outcome = pooch_command("max-batch", "resnet50", "--budget", "1GiB", "--grow", "length")
    assert outcome.code == 2
    assert "resnet50' does not grow by 'length': choose batch_size, image_size" in outcome.error_line


def test_an_unknown_experiment_names_those_that_there_are(pooch_command: Command) -> None:
    outcome = pooch_command("reproduce", "vdnn")
    assert outcome.code == 2
    assert "choose one of pooch, tflms, unet3d, meng, char-rnn" in outcome.error_line


def test_recorded_answers_are_shown_without_asking(pooch_command: Command, tmp_path: Path) -> None:
    outcome = pooch_command("reproduce", "pooch", "-o", tmp_path, "--show", "--rows", "resnet50-640-*")
    assert outcome.code == 0
    assert "+28%" in outcome.out
    assert "open" in outcome.out
    assert pooch_command("reproduce", "pooch", "--show").code == 2
