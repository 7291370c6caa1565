"""Copies and replays are NVTX ranges under `emit_nvtx`, seen from where nsys looks; without it there are none."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.children import child_environment

SOURCE = Path(__file__).with_name("nvtx.cpp")
PROGRAM = """
    import json, sys, torch, pooch
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model, inputs = torch.nn.Sequential(*layers).cuda(), torch.randn(1024, 64, device="cuda")
    forward = lambda: model(inputs).square().mean()
    profile = pooch.profile(forward, model)
    ids = [value.id for value in profile.activations if not value.saved_outside_model]
    choices = {each: ("swap", "recompute")[number % 2] for number, each in enumerate(ids)}
    with pooch.apply(pooch.plan_from_decisions(profile, choices), model, verify="off") as run:
        torch.cuda.nvtx.range_push("quiet begins")
        for _ in range(2):
            forward().backward()
        torch.cuda.nvtx.range_push("quiet ends")
        with torch.autograd.profiler.emit_nvtx():
            forward().backward()
        stats = run.stats
    copies = [action.kind for action in run.plan.schedule.actions]
    print(json.dumps({kind: copies.count(kind) for kind in ("copy_out", "copy_in")} | {"ops": stats.recomputed_ops}))
"""
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def test_nsys_would_see_what_a_step_moves_and_only_where_it_was_asked_for(tmp_path: Path) -> None:
    headers = list(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/include/nvtx3/nvToolsExt.h"))
    if not headers:
        pytest.skip("the headers of NVTX are not there")
    library, names = tmp_path / "nvtx.so", tmp_path / "names"
    build = ["g++", "-shared", "-fPIC", "-I", str(headers[0].parents[1]), str(SOURCE), "-o", str(library)]
    subprocess.run(build, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=child_environment(NVTX_INJECTION64_PATH=str(library), NVTX_NAMES=str(names), SIMULATED_CUDA_KERNEL_US="0"),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads(done.stdout.splitlines()[-1])
    seen = names.read_text().splitlines()
    quiet = seen[seen.index("quiet begins") : seen.index("quiet ends")]
    assert quiet == ["quiet begins"]
    kinds = Counter(" ".join(name.split()[1:3]) for name in seen[len(quiet) :] if name.startswith("pooch: "))
    assert kinds["copy out"] == expected["copy_out"] > 0
    assert kinds["copy in"] == expected["copy_in"] > 0
    assert sum(number for kind, number in kinds.items() if kind.startswith("replay")) == expected["ops"] > 0
