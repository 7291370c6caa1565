"""What the steps of a workload take from the simulated device in memory mode, under one allocator, as JSON.

python -m tests.simulated_cuda.arena_bytes plan|caching|arena WORKLOAD BATCH_SIZE [PLAN]

"plan" profiles, plans at 60% of the in-core peak (or at the smallest budget that there is) and saves the plan. The
others train in a process that did nothing before, plainly where no plan is named: "caching" under PyTorch's own
allocator as it is set up, "arena" under Pooch's, with the memory of its steps from an arena after the first ones.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import pooch
from pooch.allocation import ArenaOptions
from pooch.api.arenas import PlainArena, arena_for
from pooch.executor import Run, apply_plan
from pooch.torchtools import accelerators
from pooch.torchtools.memory_trace import earlier_objects_exempt
from pooch.workloads import Workload
from tests.simulated_cuda.mistakes import take_mistakes
from tests.simulated_cuda.peaks import fresh, planned, profiled

FIRST_STEPS, STEPS = 4, 6  # a warm one, two that are recorded, one beside which they are packed; and those served
SHARE = 0.6
PACK_LIMIT_S = 5.0  # of packing: the machine may be slow
DEVICE = torch.device("cuda", 0)


def save_plan(name: str, batch_size: int, path: Path) -> dict[str, Any]:
    """Profile and plan."""
    with fresh(name, batch_size) as workload:
        profile = profiled(workload, "run")
    plan = planned(profile, SHARE)
    plan.save(path)
    return {
        "in_core_peak_bytes": profile.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
    }


def train(workload: Workload, run: Run | None, steps: int) -> dict[str, int]:
    """The user's loop, and the highest figures of its steps."""
    assert workload.optimizer is not None
    accelerators.reset_peaks(DEVICE)
    highest: dict[str, int] = {}
    for _ in range(steps):
        with run.step() if run is not None else nullcontext():
            loss = workload.forward()
        loss.backward()
        del loss
        workload.optimizer.step()
        workload.optimizer.zero_grad(set_to_none=True)
        counters = accelerators.memory_counters(DEVICE)  # a run resets them when it begins a step
        for kind in ("requested", "allocated", "reserved"):
            highest[kind] = max(highest.get(kind, 0), counters[f"{kind}_bytes.all.peak"])
    return highest


def train_as_usual(workload: Workload, plan: pooch.Plan | None) -> dict[str, Any]:
    """Under the allocator that PyTorch has."""
    with apply_plan(plan, workload.model, verify="off") if plan is not None else nullcontext() as run:
        first = train(workload, run, FIRST_STEPS)
        rest = train(workload, run, STEPS)
    return {"first": first, "rest": rest}


def train_on_arena(workload: Workload, plan: pooch.Plan | None) -> dict[str, Any]:
    """Under Pooch's allocator; what stays is what lives between two steps."""
    options = ArenaOptions(pack_limit_s=PACK_LIMIT_S)
    memory: Any
    if plan is not None:
        memory = arena_for(workload.model, options)
        around: Any = apply_plan(plan, workload.model, memory=memory, verify="off")
    else:
        around = memory = PlainArena(workload.model, options)
    with around as found:
        run = found if plan is not None else None
        first = train(workload, run, FIRST_STEPS)
        staying_bytes = accelerators.allocated_bytes(DEVICE)
        memory.wait()
        train(workload, run, 1)  # the arena takes the place of what the first steps left behind
        rest = train(workload, run, STEPS)
        stats = asdict(memory.stats)
    return {"first": first, "rest": rest, "staying_bytes": staying_bytes, "arena": stats}


def main() -> None:
    """One line."""
    way, name, items, *paths = sys.argv[1:]
    batch_size = int(items)
    if way == "plan":
        result = save_plan(name, batch_size, Path(paths[0]))
    else:
        if way == "arena":
            pooch.install_cuda_arena()
        plan = pooch.Plan.load(Path(paths[0])) if paths else None
        with fresh(name, batch_size) as workload:
            gc.collect()
            with earlier_objects_exempt():
                result = (train_on_arena if way == "arena" else train_as_usual)(workload, plan)
    sys.stdout.write(json.dumps(result | {"mistakes": take_mistakes()}) + "\n")


if __name__ == "__main__":
    main()
