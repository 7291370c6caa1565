"""PyTorch's stream sanitizer and the simulated device find the same programs racy and the same ones clean."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.children import child_environment
from tests.simulated_cuda.mistakes import is_simulated
from tests.simulated_cuda.stream_programs import PROGRAMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_simulated(), reason="compares what a simulated device reports"),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda.stream_programs"],
        env=child_environment(TORCH_CUDA_SANITIZER="1", SIMULATED_CUDA_KERNEL_US="0"),
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("racy")])
def test_both_find_a_race(seen: dict[str, dict[str, list[str]]], name: str) -> None:
    assert "has not waited for it" in seen[name]["device"][0]
    assert seen[name]["sanitizer"] == ["UnsynchronizedAccessError"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("clean")])
def test_both_find_nothing(seen: dict[str, dict[str, list[str]]], name: str) -> None:
    assert seen[name] == {"device": [], "sanitizer": []}


def test_the_device_alone_looks_at_memory_that_goes_back(seen: dict[str, dict[str, list[str]]]) -> None:
    found = seen["unseen_by_the_sanitizer_block_given_back"]
    assert "the allocator, which has the memory back" in found["device"][0]
    assert found["sanitizer"] == []
