"""The wheel of this checkout, built once for a test run."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pip(python: Path | str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    finished = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT
    )
    if "No matching distribution" in finished.stderr or "ConnectionError" in finished.stderr:
        pytest.skip("the package index cannot be reached")
    assert finished.returncode == 0, finished.stderr


def built_wheel(folders: pytest.TempPathFactory) -> Path:
    """Return the wheel; whoever asks first builds it, and the other workers wait."""
    base = folders.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel-of-this-checkout"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), ".")
    (wheel,) = folder.glob("*.whl")
    return wheel
