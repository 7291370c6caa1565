"""A hundred budgets held and taken off in one process: nothing may stay of any of them.

    python -m benchmarks.repeated [--runs 100] [--steps 6] [--output benchmarks/results]

Each run calls `pooch.auto`, trains a few steps, in which a plan is asked for, and calls `remove`. Writes all samples;
exit code 1 if child processes, threads, file descriptors or objects of Python differ after the first ten runs, or
resident memory grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

import pooch
from pooch.ir.files import replace_file
from pooch.torchtools.endings import run_lost

WARM_UP = 10
ALLOWED_GROWTH_BYTES = 12 * 2**20  # what the C library's allocator keeps for itself after one run and not after another


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds after a run.

    Attributes:
        run: number of the run, counted from 1.
        children: child processes.
        threads: of Python. PyTorch starts some of its own, and ends them.
        descriptors: open files.
        resident_bytes: resident memory.
        objects: that the garbage collector knows, without these samples.
    """

    run: int
    children: int
    threads: int
    descriptors: int
    resident_bytes: int
    objects: int


def trained_and_removed(runs: int, steps: int) -> list[Sample]:
    """Train under a budget again and again, and look at the process after each time."""
    return [_sample(run, steps) for run in range(1, runs + 1)]


def _sample(run: int, steps: int) -> Sample:
    _train(steps)
    run_lost()  # the next step's first look: how many finalizers it finds called depends on where planning was
    gc.collect()
    process = psutil.Process()
    return Sample(
        run,
        len(process.children(recursive=True)),
        threading.active_count(),
        process.num_fds(),
        process.memory_info().rss,
        len(gc.get_objects()) - (run - 1),
    )


def _train(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    auto = pooch.auto(model, "60%", tell=lambda line: None)
    for _ in range(steps):
        model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    auto.remove()


def faults(samples: list[Sample]) -> list[str]:
    """What did not stay as it was after the first runs."""
    settled, found = samples[WARM_UP:], []
    for name in ("children", "threads", "descriptors", "objects"):
        values = {getattr(sample, name) for sample in settled}
        if len(values) > 1:
            found.append(f"{name}: {sorted(values)}")
    half = len(settled) // 2
    first, second = ([sample.resident_bytes for sample in part] for part in (settled[:half], settled[half:]))
    if max(second) - max(first) > ALLOWED_GROWTH_BYTES:
        found.append(f"resident memory: at most {max(first)} bytes in the first half and {max(second)} in the second")
    return found


def main() -> int:
    """Run, write the samples, and tell what did not stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = trained_and_removed(arguments.runs, arguments.steps)
    found = faults(samples)
    lines = [json.dumps(asdict(sample)) for sample in samples]
    arguments.output.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.output / "repeated-cpu.json", ("[\n" + ",\n".join(lines) + "\n]\n").encode())
    shown = [samples[at - 1] for at in (1, 10, 25, 50, 75, 100) if at <= len(samples)]
    print(*(asdict(each) for each in shown), *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
