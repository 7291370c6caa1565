"""Steps that do not fit in memory: every phase from a cold start, in a process that plain training does not fit into.

Each child gets a limit on its private writable memory (`ulimit -d`): the budget, and what `BESIDE_BYTES` says. The
plain step of the workload takes 929 MiB, so it dies there.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20
BUDGET_BYTES = 320 * MIB
IN_CORE_BYTES = 900 * MIB
BESIDE_BYTES = 512 * MIB  # interpreter, PyTorch and its libraries, the solver, what recording a step takes

USER_FILE = """
import torch
import pooch

def make(batch_size=65536, device="cpu"):
    torch.manual_seed(0)
    blocks = [m for _ in range(12) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())]
    model = torch.nn.Sequential(*blocks).to(device)
    data = torch.randn(batch_size, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pooch.Workload(model, lambda: model(data).square().mean(), optimizer)
"""


def limited(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that cannot take more than the budget and what the process itself needs."""
    limit = BUDGET_BYTES + BESIDE_BYTES

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder, timeout=900,
        preexec_fn=set_limit, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "big.py").write_text(USER_FILE)
    return tmp_path


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_plain_training_dies_in_one_line_and_optimize_trains_from_a_cold_start(folder: Path) -> None:
    plain = limited(["-m", "pooch", "run", "big.py:make", "--steps", "1"], folder)
    assert plain.returncode == 1
    assert "out of memory" in plain.stderr.splitlines()[-1]
    assert "Traceback" not in plain.stderr

    budget = ["--budget", str(BUDGET_BYTES)]
    done = json_of(limited(["-m", "pooch", "optimize", "big.py:make", *budget, "--check", "--json"], folder))
    assert done["profile"]["mode"] == "offload"
    assert done["plan"]["in_core_peak_bytes"] > IN_CORE_BYTES
    training = done["training"]
    assert training["fits_in_core"] is False
    assert training["plain_step_ms"] is None
    assert training["slowdown"] is None
    assert training["measured_peak_bytes"] <= BUDGET_BYTES
    assert training["within_budget"] is True
    assert training["swapped_out_bytes"] + training["recomputed_ops"] > 0
    assert (training["bitwise_equal"], training["compared_with"]) == (True, "offloaded")


@pytest.mark.slow
def test_saved_profiles_and_plans_work_there_too_and_words_say_what_is_modelled(folder: Path) -> None:
    profiled = limited(["-m", "pooch", "profile", "big.py:make", "-o", "p.json"], folder)
    assert profiled.returncode == 0, profiled.stderr
    assert "may not fit in-core" in " ".join(profiled.stdout.split())
    assert "modelled" in profiled.stdout
    budget = ["--budget", str(BUDGET_BYTES)]
    planned = limited(["-m", "pooch", "plan", "p.json", *budget, "--region", "step", "-o", "plan.json"], folder)
    assert planned.returncode == 0, planned.stderr
    run = limited(["-m", "pooch", "run", "big.py:make", "--plan", "plan.json", "--steps", "2"], folder)
    assert run.returncode == 0, run.stderr
    told = " ".join(run.stdout.split())
    assert "does not fit in-core" in told
    assert "in-core time modelled" in told
    measuring = ["--policy", "swap_all", "--measure", "big.py:make", "--json"]
    compared = limited(["-m", "pooch", "compare", "p.json", *budget, *measuring], folder)
    (row,) = json_of(compared)
    assert 0 < row["measured_peak_bytes"] <= BUDGET_BYTES
    assert row["measured_plain_step_ms"] is None


FROM_PYTHON = """
import json
import torch
import pooch
from big import make

BUDGET = {budget}
told = {{}}
work = make()
profile = pooch.profile(work.forward, work.model, work.optimizer)
plan = pooch.plan(profile, BUDGET, region="step")
with pooch.apply(plan, work.model) as run:
    for _ in range(2):
        with run.step():
            loss = work.forward()
        loss.backward(); work.optimizer.step(); work.optimizer.zero_grad()
    told["swapped"], told["late"] = run.stats.swapped_out_bytes + run.stats.recomputed_ops, run.stats.mismatches
losses = []
with pooch.guard(profile, BUDGET, work.model, work.optimizer) as guard:
    for _ in range(2):
        losses.append(float(guard.step(work.forward))); work.optimizer.step(); work.optimizer.zero_grad()
    told["guarded_peak"] = guard.run.stats.peak_bytes
del work, loss, guard, run  # they hold the model and its data
found = pooch.max_batch(make, BUDGET, start=16384, most=131072, points=2, measure_steps=1, policy="swap_all")
told["mode"], told["largest"] = profile.mode, found.largest.size
told["trained"] = [[m.size, m.planned, m.peak_bytes] for m in found.measured]
print(json.dumps(told))
"""


@pytest.mark.slow
def test_profile_plan_apply_guard_and_max_batch_work_there_from_python(folder: Path) -> None:
    (folder / "script.py").write_text(FROM_PYTHON.format(budget=BUDGET_BYTES))
    told = json_of(limited(["script.py"], folder))
    assert told["mode"] == "offload"
    assert told["swapped"] > 0
    assert told["late"] == 0
    assert 0 < told["guarded_peak"] <= BUDGET_BYTES
    assert told["largest"] > 16384
    assert all(peak <= BUDGET_BYTES for _, _, peak in told["trained"])
    assert [told["largest"], True] in [[size, planned] for size, planned, _ in told["trained"]]


HARD_LIMIT = ["optimize", "big.py:make", "--budget", str(BUDGET_BYTES), "--hard-limit", "--steps", "1", "--json"]


@pytest.mark.slow
def test_a_hard_limit_inside_of_a_limited_process_tells_who_died(folder: Path) -> None:
    training = json_of(limited(["-m", "pooch", *HARD_LIMIT], folder))["training"]
    assert training["hard_limit_plain"].startswith("died")
    assert training["hard_limit_planned"] == "went through"
