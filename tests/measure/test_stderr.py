"""What runs from Python writes nothing to stderr that the user's program did not write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.children import child_environment

SCRIPT = """
import os
import sys
import warnings
import torch
import pooch

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)))
data = torch.randn(4096, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def forward():
    return model(data).square().mean()

def steps(run):
    for _ in range(2):
        with run.measured():
            optimizer.zero_grad()  # frees what was allocated before the measuring
            loss = forward()
            loss.backward()
        optimizer.step()

profile = pooch.profile(forward, model, optimizer)
plan = pooch.plan(profile, "80%")
with pooch.apply(plan, model) as run:
    steps(run)
    assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    assert run.stats.peak_bytes > 0
if "loud" in sys.argv:
    with pooch.apply(plan, model) as run, run.measured():
        os.write(2, b"mine\\n")
        warnings.warn("mine too")
    assert "KINETO_LOG_LEVEL" not in os.environ
"""


def stderr_of(script: str, folder: Path, *arguments: str) -> str:
    path = folder / "train.py"
    path.write_text(script)
    environment = child_environment()
    environment.pop("KINETO_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_profiling_planning_and_training_from_python_write_nothing_to_stderr(tmp_path: Path) -> None:
    assert stderr_of(SCRIPT, tmp_path) == ""


def test_what_the_program_itself_writes_to_stderr_passes(tmp_path: Path) -> None:
    told = stderr_of(SCRIPT, tmp_path, "loud")
    assert "mine\n" in told
    assert "UserWarning: mine too" in told
    assert "USDT" not in told
