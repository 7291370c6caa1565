"""Trains a workload in this process, plainly or from cold under a plan, and prints what came of it as JSON.

python -m tests.simulated_cuda.training plain|planned WORKLOAD BATCH_SIZE BUDGET_BYTES STEPS [TIMELINE]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import pooch
from pooch.workloads import Workload, load_workload
from tests.simulated_cuda.mistakes import start_timeline, take_mistakes, write_timeline


def digest(workload: Workload, losses: list[torch.Tensor]) -> str:
    """One hash of losses, gradients, parameters, buffers and the generator's state: equal where all bits are."""
    model = workload.model
    tensors = [*losses, *(p.grad for p in model.parameters() if p.grad is not None), *model.state_dict().values()]
    found = hashlib.sha256()
    for tensor in [*tensors, torch.cuda.get_rng_state()]:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(workload: Workload, steps: int, run: Any = None, timeline: Path | None = None) -> dict[str, Any]:
    """The user's loop.

    Args:
        workload: What is trained.
        steps: How many steps.
        run: The run under which it trains, if any.
        timeline: Where to write what the streams did in the last step.
    """
    losses: list[torch.Tensor] = []
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        if timeline is not None and step == steps - 1:
            torch.cuda.synchronize()
            start_timeline()
        workload.optimizer.zero_grad(set_to_none=True)
        loss = workload.forward()
        loss.backward()
        workload.optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    if timeline is not None:
        write_timeline(timeline)
    counters = torch.cuda.memory_stats()
    result = {f"{kind}_bytes": counters[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")}
    result["losses"] = [loss.item() for loss in losses]
    if run is not None:
        result |= {"swapped_bytes": run.stats.swapped_in_bytes, "replayed_ops": run.stats.recomputed_ops}
        result |= {"late_swaps": run.stats.late_swaps, "mismatches": run.stats.mismatches}
    return {**result, "digest": digest(workload, losses), "mistakes": take_mistakes()}


def main() -> None:
    """Exit code 1 where memory runs out, with the error's first line."""
    kind, name, batch_size, budget_bytes, steps, *timeline = sys.argv[1:]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    workload = load_workload(name, batch_size=int(batch_size), device="cuda")
    try:
        if kind == "plain":
            result = train(workload, int(steps))
        else:
            profile = pooch.profile(workload.forward, workload.model, workload.optimizer)
            plan = pooch.plan(profile, int(budget_bytes), policy=kind, time_limit_s=20)
            computes = os.environ["SIMULATED_CUDA_NUMBERS"] == "1"  # otherwise there is nothing to compare
            with pooch.apply(plan, workload.model, verify="first" if computes else "off") as run:
                result = train(workload, int(steps), run, Path(timeline[0]) if timeline else None)
            choices = list(plan.decisions.values())
            result |= {"mode": profile.mode, "in_core_peak_bytes": profile.peak_bytes}
            result |= {"predicted_peak_bytes": plan.predicted_peak_bytes, "budget_bytes": plan.budget_bytes}
            result |= {choice: choices.count(choice) for choice in ("keep", "swap", "recompute")}
    except torch.OutOfMemoryError as error:
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}) + "\n")
        sys.exit(1)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
