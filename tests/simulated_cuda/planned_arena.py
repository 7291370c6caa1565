"""Trains a workload under a plan that swaps and recomputes, and writes what came of it as JSON.

python -m tests.simulated_cuda.planned_arena caching|arena WORKLOAD BATCH_SIZE PLAN

"caching" profiles, keeps, swaps and recomputes in turns, and saves that plan; "arena" loads it and trains with the
memory of its steps from an arena.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import pooch
from pooch.executor import Run
from pooch.torchtools import accelerators
from pooch.workloads import Workload, load_workload
from tests.executor.support import mixed, tight_plan
from tests.simulated_cuda.mistakes import is_simulated, take_mistakes
from tests.simulated_cuda.peaks import profiled

STEPS = 7
DEVICE = torch.device("cuda", 0)


def trained(workload: Workload, run: Run) -> dict[str, Any]:
    """The user's loop, and a hash of what every step left."""
    assert workload.optimizer is not None
    found = hashlib.sha256()
    peaks = []
    for _ in range(STEPS):
        workload.optimizer.zero_grad(set_to_none=True)
        with run.step():
            loss = workload.forward()
        loss.backward()
        peaks.append(accelerators.peak_allocated_bytes(DEVICE))
        gradients = [p.grad for p in workload.model.parameters() if p.grad is not None]
        workload.optimizer.step()
        for tensor in [loss, *gradients, *workload.model.state_dict().values()]:
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        del loss, gradients, tensor
    moved = {"swapped_bytes": run.stats.swapped_in_bytes, "replayed_ops": run.stats.recomputed_ops}
    return {"digest": found.hexdigest()[:16], "peak_bytes": max(peaks[1:]), "mismatches": run.stats.mismatches, **moved}


def main() -> None:
    """Train."""
    way, name, batch_size, path = sys.argv[1:]
    if way == "arena":
        pooch.install_cuda_arena()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    workload = load_workload(name, batch_size=int(batch_size), device="cuda")
    profile = profiled(workload, "run")
    if way == "caching":
        tight_plan(profile, mixed(profile)).save(Path(path))
    plan = pooch.Plan.load(Path(path))
    with pooch.apply(plan, workload.model, arena=way == "arena", verify="off") as run:
        result = trained(workload, run)
        arena = run.totals.arena
    if arena is not None:
        result |= {"arena": asdict(arena), "line": arena.line()}
    result |= {"profiled_peak_bytes": profile.peak_bytes, "predicted_peak_bytes": plan.predicted_peak_bytes}
    sys.stdout.write(json.dumps(result | {"mistakes": take_mistakes() if is_simulated() else []}) + "\n")


if __name__ == "__main__":
    main()
