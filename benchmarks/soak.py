"""A thousand small planned steps: live tensors, process memory, threads and file descriptors have to stay flat.

`python -m benchmarks.soak [--steps 1000]`. Every tenth forward has no backward pass and every twentieth raises, as in
users' loops. Prints ten rows; exit code 1 if something grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from benchmarks.handmade import tight_plan, tiny_profile
from pooch.executor import apply_plan
from pooch.ir import Choice, Plan, Profile
from pooch.ir.dataflow import Dataflow
from pooch.torchtools.memory_trace import live_bytes

# What the C library's allocator may keep for itself while it settles.
ALLOWED_PROCESS_GROWTH_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds after some steps. `process_bytes`: resident memory."""

    steps: int
    live_bytes: int
    process_bytes: int
    threads: int
    descriptors: int


def small_net() -> nn.Module:
    """Convolutions with batch norm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Conv2d(8, 8, 3), nn.SiLU(),
        nn.Conv2d(8, 4, 3), nn.Tanh(),
    )  # fmt: skip


def tight_mixed_plan(profile: Profile) -> Plan:
    """Swap and recompute in turns, everything away as long as possible."""
    dataflow = Dataflow(profile, "step")
    turns: tuple[Choice, ...] = ("swap", "recompute")
    ids = [v.id for v in dataflow.activations]
    return tight_plan(profile, {v: turns[i % 2] if dataflow.refusal(v) is None else "swap" for i, v in enumerate(ids)})


def soak(steps: int, every: int) -> list[Sample]:
    """Train, and look at the process every so many steps."""
    model, pictures = small_net(), torch.rand(4, 3, 24, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def forward() -> Tensor:
        result: Tensor = model(pictures).square().mean()
        return result

    plan = tight_mixed_plan(tiny_profile(forward, model, optimizer))
    samples: list[Sample] = []
    with apply_plan(plan, model) as run:
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            if number % 20 == 0:
                try:
                    with run.step():
                        forward()
                        raise ZeroDivisionError
                except ZeroDivisionError:
                    pass
            with run.step():
                loss = forward()
            if number % 10:
                loss.backward()
                optimizer.step()
                assert run.stats.swapped_in_bytes > 0
                assert run.stats.recomputed_ops > 0
                assert run.stats.late_swaps == run.stats.mismatches == 0
            del loss
            if number % every == 0:
                samples.append(_sample(number))
    return samples


def _sample(steps: int) -> Sample:
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    resident = psutil.Process(os.getpid()).memory_info().rss
    return Sample(steps, live_bytes(torch.device("cpu")), resident, threading.active_count(), descriptors)


def growth(samples: list[Sample]) -> list[str]:
    """What grew between the first sample and the last one."""
    first, last = samples[0], samples[-1]
    found = [
        f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
        for name in ("live_bytes", "threads", "descriptors")
        if getattr(last, name) > getattr(first, name)
    ]
    if last.process_bytes - first.process_bytes > ALLOWED_PROCESS_GROWTH_BYTES:
        found.append(f"process memory grew from {first.process_bytes} to {last.process_bytes} bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = soak(arguments.steps, max(1, arguments.steps // 10))
    print("| steps | live tensors (bytes) | process (bytes) | threads | file descriptors |\n|---|---|---|---|---|")
    for one in samples:
        print(f"| {one.steps} | {one.live_bytes} | {one.process_bytes} | {one.threads} | {one.descriptors} |")
    grown = growth(samples)
    print("\n" + ("; ".join(grown) if grown else "nothing grew"))
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
