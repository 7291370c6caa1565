"""Sweeps within a time: those that it does not suffice for are skipped, and the next commit begins with others."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

SECONDS_VARIABLE = "POOCH_SWEEP_SECONDS"
_started_s = time.monotonic()


def rotated(items: list[pytest.Item], start: int) -> list[pytest.Item]:
    """Return tests in another order, which begins with those of another file.

    Args:
        items: Tests, those of a file in a row.
        start: The number of that file, modulo that of the files.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if not files:
        return items
    first = files[start % len(files)]
    at = next(index for index, item in enumerate(items) if item.path == first)
    return items[at:] + items[:at]


def commit_number() -> int:
    """Return a number that differs from commit to commit; 0 where there is no repository."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(found.stdout or "0", 16)


def skip_if_late() -> None:
    """Skip the test that is about to run if the time given in the environment has passed."""
    given = os.environ.get(SECONDS_VARIABLE)
    if given and time.monotonic() - _started_s > float(given):
        pytest.skip("no time was left for it")
