"""Page-locked memory by plan: exactly the bytes that it swaps, in parts, refused before training, and given back."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.torchtools.device_memory import free_bytes
from tests.children import child_environment
from tests.simulated_cuda.large_tier import GIB
from tests.simulated_cuda.mistakes import is_simulated

NEEDED_BYTES = 14 * GIB
MEMORY_MODE = {
    "SIMULATED_CUDA_NUMBERS": "0",
    "SIMULATED_CUDA_POISON": "0",
    "SIMULATED_CUDA_MEMORY_MIB": "40960",
    "SIMULATED_CUDA_KERNEL_US": "0",
    "SIMULATED_CUDA_COPY_GB_PER_S": "1000",
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_simulated(), reason="needs the simulated device, which has room for it"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with (Path(tempfile.gettempdir()) / "pooch-tests-large-tier").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run beside each other: there is no room for two
        if free_bytes(torch.device("cpu")) < NEEDED_BYTES:
            pytest.skip("the machine has not enough memory left")
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulated_cuda.large_tier"],
            env=child_environment(**MEMORY_MODE), capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("plan", "gib"), [("large", 12), ("small", 3)])
def test_a_plan_locks_what_it_swaps_before_the_first_step(found: dict[str, Any], plan: str, gib: int) -> None:
    told = found[plan]
    assert told["needed"] == told["swapped"] == gib * GIB
    assert told["before_the_first_step"] == told["most"]
    assert gib * GIB <= sum(told["most"]) <= 1.01 * gib * GIB
    assert max(told["most"]) <= 4 * GIB
    assert told["left"] == []


def test_plans_in_turn_take_what_the_larger_one_needs(found: dict[str, Any]) -> None:
    assert 3 * GIB <= sum(found["in_turn"]) <= 1.01 * 3 * GIB


def test_a_limit_is_told_before_the_first_step(found: dict[str, Any]) -> None:
    assert f"swapping needs {12 * GIB} bytes of host memory, {8 * GIB} are available" in found["refused"]
    assert "at most 7.75 GiB" in found["refused"]
    assert found["left"] == []
