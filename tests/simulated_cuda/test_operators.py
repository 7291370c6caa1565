"""Every operator that PyTorch's own tests know is right on the simulated device, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_cuda.mistakes import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_simulated(), reason="about the simulated CUDA device: python -m tests.simulated_cuda pytest"
    ),
    pytest.mark.skipif(
        os.environ.get("SIMULATED_CUDA_NUMBERS") != "1", reason="kernels compute nothing in memory mode"
    ),
]

# PyTorch's CUDA build has no such kernel, or checks what the CPU's does not.
RAISED_BY_PYTORCH = {
    "narrow_copy",
    "sparse.mm.reduce",
    "sparse.sampled_addmm",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "to_sparse",
}


@pytest.mark.parametrize(
    ("dtype", "samples", "right_at_least", "refused_at_most"),
    [("float32", 4, 6000, 4), ("bfloat16", 1, 1200, 6), ("int64", 1, 1000, 4)],
)
def test_operators_give_the_cpu_s_numbers_or_refuse(
    tmp_path: Path, dtype: str, samples: int, right_at_least: int, refused_at_most: int
) -> None:
    found = swept(tmp_path, dtype, samples)
    assert {row["op"]: row["wrong"] for row in found if row["wrong"]} == {}
    assert {row["op"] for row in found if row["raised"]} <= RAISED_BY_PYTORCH
    assert len([row for row in found if row["refused"]]) <= refused_at_most
    assert sum(row["right"] for row in found) >= right_at_least
    assert len(found) > 650


def swept(folder: Path, dtype: str, samples: int) -> list[dict[str, Any]]:
    """Run the sweep in two processes beside each other, and read what it found."""
    processes = []
    for part in range(2):
        command = [sys.executable, "-W", "ignore", "-m", "tests.simulated_cuda.sweep", "--dtype", dtype]
        command += ["--samples", str(samples), "--part", f"{part}/2", "--output", str(folder / f"{part}.jsonl")]
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    assert [process.wait() for process in processes] == [0, 0]
    return [json.loads(line) for part in range(2) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
