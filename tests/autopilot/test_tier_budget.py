"""What the swap tier may take is checked before training begins, if parameters, gradients and state have to leave."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pooch
from pooch.autopilot.node import tier_budget
from pooch.ground.errors import InfeasibleTier, UsageError
from pooch.torchtools import watch
from tests.autopilot.test_persistence import LAYER_BYTES, LAYERS, adamw, away, everything, held, network, step, tight
from tests.children import child_environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_watch = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")


@needs_watch
def test_a_tier_that_is_too_small_is_refused_with_the_smallest_that_suffices() -> None:
    def trained(disk_budget: int | None) -> list[bytes]:
        model = network()
        optimizer = adamw(model)
        torch.manual_seed(1)
        with held(model, optimizer, tight(model), disk_budget=disk_budget) as auto:
            for _ in range(3):
                step(model, optimizer)
            assert away(auto) > 0
            assert disk_budget is None or auto._driver.evictor.engine.room.most_bytes <= disk_budget
        return everything(model, optimizer)

    expected = trained(None)
    model = network()
    with pytest.raises(InfeasibleTier, match="raise the disk budget to that") as refused:
        pooch.auto(model, tight(model), adamw(model), disk_budget="1MiB", quiet=True)
    assert refused.value.minimum_bytes > 4 * LAYERS * LAYER_BYTES
    with pytest.raises(InfeasibleTier):
        pooch.auto(model, tight(model), adamw(model), disk_budget=refused.value.minimum_bytes - 4096, quiet=True)
    assert trained(refused.value.minimum_bytes) == expected


@needs_watch
def test_a_model_that_fits_needs_no_room_in_the_tier() -> None:
    model = network()
    with pooch.auto(model, "1GiB", adamw(model), disk_budget="1MiB", quiet=True) as auto:
        step(model, adamw(model))
        assert auto._driver._persistence.memory is None


def test_the_error_survives_pickling() -> None:
    error = InfeasibleTier(1, 2, "disk budget")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_budget_is_of_the_tier_that_there_is() -> None:
    assert tier_budget(CPU, None, None) is None
    assert tier_budget(CPU, None, "1MiB") == tier_budget(CPU, "1MiB", None) == tier_budget(CUDA, "1MiB", None) == 2**20
    with pytest.raises(UsageError, match="host memory and not on disk"):
        tier_budget(CUDA, None, "1MiB")
    with pytest.raises(UsageError, match="not both"):
        tier_budget(CPU, "1MiB", "1MiB")
    with pytest.raises(UsageError, match="the disk budget 'x' does not parse"):
        tier_budget(CPU, None, "x")


@needs_watch
@pytest.mark.slow
def test_a_script_ends_before_it_trains(tmp_path: Path) -> None:
    script = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(192, 192) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 192)).sum().backward()
print("trained")
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "pooch", "exec", "--budget", "2MiB", "--disk-budget", "1MiB", "train.py"]
    environment = child_environment(OMP_NUM_THREADS="1")
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert (ran.returncode, ran.stdout) == (3, ""), ran.stderr
    assert "raise the disk budget to that" in ran.stderr
    assert "Traceback" not in ran.stderr
