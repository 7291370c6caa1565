"""Training under the CUDA arena, with PyTorch's own CUDA build: the same numbers, at their places, and no race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.children import child_environment
from tests.simulated_cuda.mistakes import is_simulated

computes = is_simulated() and os.environ.get("SIMULATED_CUDA_NUMBERS") != "0"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not computes, reason="needs the simulated device, computing numbers"),
]


def trained(way: str) -> dict[str, Any]:
    """In a process of its own: PyTorch's allocator can only be chosen once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda.arena_training", way],
        env=child_environment(), capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_steps_on_an_arena_compute_the_same_and_a_copy_is_waited_for() -> None:
    expected, actual = trained("caching"), trained("arena")
    assert expected["mistakes"] == actual["mistakes"] == []
    assert actual["found"] == expected["found"]
    counters = actual["counters"]
    assert counters["placed"] == counters["steps"] * actual["blocks"] > 200
    assert counters["unrecognised"] + counters["collided"] + counters["beyond"] == 0
