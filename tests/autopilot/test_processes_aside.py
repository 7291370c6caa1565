"""The processes that measure and plan beside training, and that end with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.children import child_environment
from tests.toys import blocks

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("module", ["measuring_process", "planning_process"])
def test_they_end_with_the_program_that_trains(module: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    blocks(2).save(path)
    code = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-m', 'pooch.autopilot.{module}', {str(path)!r}]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(1)\n"  # as if it was killed
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), stdout=subprocess.PIPE, check=False)
    child = Path("/proc") / done.stdout.decode().strip()
    before = path.read_bytes()
    while child.exists() and (child / "cmdline").read_bytes():
        time.sleep(0.05)
    assert path.read_bytes() == before, "it measured to its end"
