"""Counters, and PyTorch's stream sanitizer, find in trainings in which nothing moves what they find without Pooch.

The first steps of a kind are recorded, and have a larger peak where a linear layer adds its bias out of place for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.children import child_environment
from tests.simulated_cuda.mistakes import is_simulated

Found = dict[str, dict[str, Any]]
AT_ONCE = {"SIMULATED_CUDA_KERNEL_US": "0", "SIMULATED_CUDA_COPY_GB_PER_S": "1000", "OMP_NUM_THREADS": "1"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not is_simulated(), reason="runs of two processes have the same counters on a simulated device"),
]


def run(kind: str, **variables: str) -> tuple[Found, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda.counters", kind],
        env=child_environment(**AT_ONCE, **variables), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def both() -> tuple[Found, Found]:
    return run("plain")[0], run("governed")[0]


def test_losses_and_the_highest_bytes_are_those_of_plain_trainings(both: tuple[Found, Found]) -> None:
    plain, governed = both
    assert len(plain) == 10
    for name, expected in plain.items():
        assert governed[name]["losses"] == expected["losses"], name
        assert governed[name]["highest"] == expected["highest"], name


def test_memory_stats_are_those_of_plain_trainings(both: tuple[Found, Found]) -> None:
    plain, governed = both
    for name, expected in plain.items():
        for kind in ("peaks", "growth"):
            found = governed[name][kind]
            assert {key: (size, found.get(key)) for key, size in expected[kind].items() if found.get(key) != size} == {}


def test_the_stream_sanitizer_says_what_it_says_of_plain_trainings() -> None:
    (plain, said), (governed, also_said) = (run(kind, TORCH_CUDA_SANITIZER="1") for kind in ("plain", "governed"))
    assert [each["losses"] for each in governed.values()] == [each["losses"] for each in plain.values()]
    assert _of_the_sanitizer(also_said) == _of_the_sanitizer(said)


def _of_the_sanitizer(text: str) -> list[str]:
    return [line for line in text.splitlines() if "CSAN" in line or "data race" in line]
