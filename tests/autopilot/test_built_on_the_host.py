"""A program that builds its model on the host trains on the device that it is given."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pooch
from pooch.torchtools import watch
from tests.children import child_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively"),
]
SCRIPT = """
import sys, torch
from torch import nn

WIDTH, LAYERS = 256, 8
how = sys.argv[1]
device = "cpu" if how == "stays" else "cuda"
torch.manual_seed(0)
model = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
if how == "to":
    model.to(device)
if how == "cuda":
    model.cuda()
if how == "parts":
    for part in model:
        part.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1)
for _ in range(3):
    inputs, targets = torch.randn(16, WIDTH).to(device), torch.randn(16, WIDTH).to(device)
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
print([parameter.detach().double().sum().item().hex() for parameter in model.parameters()])
"""


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # cuBLAS takes a workspace of tens of mebibytes otherwise.
    environment = child_environment(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":16:8")
    return subprocess.run(
        [sys.executable, *arguments], cwd=path, env=environment, capture_output=True, text=True, timeout=280, check=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stays", "to", "cuda", "parts"])
def test_a_script_trains_on_the_device_with_the_numbers_of_plain_training_there(tmp_path: Path, how: str) -> None:
    """It moves its model, or does not, and then neither its batches."""
    (tmp_path / "train.py").write_text(SCRIPT)
    expected = run(tmp_path, "train.py", "to").stdout
    ran = run(tmp_path, "-m", "pooch", "exec", "--device", "cuda", "--budget", "3MiB", "train.py", how)
    assert "pooch: Budget held" in ran.stderr, ran.stderr
    assert "parameters, gradients and the optimizer's state leave cuda memory" in ran.stderr
    assert ran.stdout == expected


def test_what_does_not_fit_is_on_the_host_again_afterwards() -> None:
    def found(device: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to("cuda" if device is None else "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        budget = torch.cuda.memory_allocated() + 3 * 2**20
        around = pooch.auto(model, budget, optimizer, device=device, quiet=True) if device else contextlib.nullcontext()
        with around:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 256, device="cuda")).square().mean().backward()
                optimizer.step()
        tensors = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
        tensors += [optimizer.state[each]["exp_avg"] for each in model.parameters()]
        assert {tensor.device.type for tensor in tensors} == {"cuda" if device is None else "cpu"}
        return [tensor.detach().cpu() for tensor in tensors]

    expected = found(None)
    assert all(map(torch.equal, found("cuda"), expected))


def test_a_second_model_is_moved_as_well() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    with pooch.auto(first, "1GiB", device="cuda", quiet=True) as auto:
        auto.add(second)
        assert {each.device.type for model in (first, second) for each in model.parameters()} == {"cuda"}
        results = second(first(torch.ones(4, 64)))
        assert results.device.type == "cpu"
        results.sum().backward()
        assert auto.summary().steps == 1


def test_state_from_before_is_moved_with_a_model_that_fits() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    with pooch.auto(model, "1GiB", optimizer, device="cuda", quiet=True):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].device.type == "cuda"
