"""Ten thousand steps of random lengths under `pooch.auto`: what the process holds has to stop growing.

    python -m benchmarks.soak --ragged [--steps 10000] [--output benchmarks/results] [--picture docs/soak.png]

Half of the lengths are drawn from a few dozen that come often, the others from thousands, most of which come once or
twice. So more kinds of steps are met than are remembered. The same steps run without Pooch too, each run in a process
of its own. There, the C library returns large blocks at once, and oneDNN keeps few kernels: left alone, both grow with
the number of lengths, with Pooch and without. Exit code 1 if resident memory, threads or file descriptors grow over the
last half of the steps by more than they go up and down.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import pooch
from benchmarks.tables import Row, markdown_table, write_results
from pooch.autopilot.autopilot import Auto
from pooch.ground.units import format_bytes
from pooch.ir.files import replace_file
from pooch.torchtools.memory_trace import live_bytes

NAME = "soak-ragged-cpu"
SAMPLES = 100
_WIDTH, _LAYERS = 32, 4
_LONGEST, _OFTEN = 4000, 40
_BUDGET_BYTES = 5 * 2**20  # above what is live before: about 70% of what the longest step needs
_LARGEST_GROWTH_BYTES = 4 * 2**20  # what the C library's allocator may keep for itself
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class RaggedSample:
    """What the process holds after some steps.

    Attributes:
        steps: Number of steps.
        process_bytes: Resident memory.
        threads: Number of Python's threads.
        descriptors: Number of open file descriptors.
        met: Number of different lengths so far.
        shapes: Kinds of steps that are remembered.
        plans: Plans that are remembered.
    """

    steps: int
    process_bytes: int
    threads: int
    descriptors: int
    met: int
    shapes: int
    plans: int


@dataclass(frozen=True, slots=True)
class Trend:
    """How something went over the last half of the steps.

    Attributes:
        growth: By how much the straight line of least squares rises.
        spread: Between the highest and the lowest distance from that line.
    """

    growth: float
    spread: float


def trend(samples: Sequence[Any], name: str) -> Trend:
    """Return how a figure of the samples went over the last half of the steps."""
    half = samples[len(samples) // 2 :]
    steps, values = [float(each.steps) for each in half], [float(getattr(each, name)) for each in half]
    mean_step, mean = sum(steps) / len(half), sum(values) / len(half)
    squares = sum((step - mean_step) ** 2 for step in steps) or 1.0
    slope = sum((step - mean_step) * (value - mean) for step, value in zip(steps, values, strict=True)) / squares
    rest = [value - mean - slope * (step - mean_step) for step, value in zip(steps, values, strict=True)]
    return Trend(slope * (steps[-1] - steps[0]), max(rest) - min(rest))


def grown(samples: Sequence[RaggedSample]) -> list[str]:
    """What grew over the last half of the steps, by more than it goes up and down."""
    found = []
    for name, allowed in (("process_bytes", _LARGEST_GROWTH_BYTES), ("threads", 1), ("descriptors", 2)):
        seen = trend(samples, name)
        if seen.growth > max(allowed, seen.spread):
            found.append(f"{name} grew by {seen.growth:.0f}, where it goes up and down by {seen.spread:.0f}")
    return found


def soak(steps: int, every: int, is_plain: bool = False) -> tuple[list[RaggedSample], str]:
    """Train, and look at the process every so many steps; returns the samples, and what Pooch says in the end."""
    torch.set_num_threads(1)
    draws, met = random.Random(0), set()
    torch.manual_seed(0)
    parts = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    budget_bytes = live_bytes(torch.device("cpu")) + _BUDGET_BYTES
    auto = None if is_plain else pooch.auto(model, budget_bytes, tell=lambda _: None)
    often = [draws.randrange(1, _LONGEST) for _ in range(_OFTEN)]
    samples = []
    for number in range(1, steps + 1):
        length = draws.choice(often) if draws.random() < 0.5 else draws.randrange(1, _LONGEST)
        met.add(length)
        model(torch.randn(length, _WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % every == 0:
            samples.append(_sample(number, len(met), auto))
    if auto is None:
        return samples, ""
    auto.remove()
    return samples, str(auto.summary())


def _sample(steps: int, met: int, auto: Auto | None) -> RaggedSample:
    gc.collect()
    shapes = [] if auto is None else auto._driver.library._known.values()
    plans = sum(known.plan is not None for known in shapes)
    resident_bytes = psutil.Process(os.getpid()).memory_info().rss
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return RaggedSample(steps, resident_bytes, threading.active_count(), descriptors, met, len(shapes), plans)


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: every tenth of a hundred samples."""
    chosen = results[max(1, len(results) // 10) - 1 :: max(1, len(results) // 10)]
    return [
        {
            "steps": result["steps"],
            "lengths met": result["met"],
            "kinds remembered": result["shapes"],
            "plans": result["plans"],
            "process": f"{result['process_bytes'] / 2**20:.1f} MiB",
            "plain training": f"{result['plain_bytes'] / 2**20:.1f} MiB",
            "threads": result["threads"],
            "file descriptors": result["descriptors"],
        }
        for result in chosen
    ]


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the stored samples, one curve above the other."""
    from matplotlib.figure import Figure

    steps = [result["steps"] for result in results]
    figure = Figure(figsize=(7, 7), layout="constrained")
    memory, kinds, counts = figure.subplots(3, 1, sharex=True)
    for name, label in (("process_bytes", "under pooch.auto"), ("plain_bytes", "plain training")):
        memory.plot(steps, [result[name] / 2**20 for result in results], label=label)
    memory.set_ylabel("resident memory (MiB)")
    for name, label in (("met", "lengths met"), ("shapes", "kinds remembered"), ("plans", "plans remembered")):
        kinds.plot(steps, [result[name] for result in results], label=label)
    kinds.set_ylabel("kinds of steps")
    for name, label in (("threads", "threads"), ("descriptors", "file descriptors")):
        counts.plot(steps, [result[name] for result in results], label=label)
    counts.set_ylabel("open")
    counts.set_xlabel("training steps of random lengths")
    for axis in (memory, kinds, counts):
        axis.set_ylim(0, None)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    replace_file(path, drawn.getvalue())


def verdict(samples: Sequence[RaggedSample]) -> str:
    """What came of it, in one line."""
    memory = trend(samples, "process_bytes")
    found = "; ".join(grown(samples)) or "nothing grew over the last half"
    change = f"{'+' if memory.growth >= 0 else '-'}{format_bytes(abs(round(memory.growth)))}"
    return f"{found}: resident memory {change} there, where it goes up and down by {format_bytes(round(memory.spread))}"


def run(steps: int, output: Path, picture: Path | None) -> int:
    """Train, print, write; returns 1 if something grows.

    Args:
        steps: How many.
        output: Folder of the results.
        picture: Where the stored samples are drawn, or None.
    """
    begin_s, every = time.monotonic(), max(1, steps // SAMPLES)
    os.environ.update(SETTINGS)  # of the processes that are started from here on
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        samples, summary = pool.submit(soak, steps, every).result()
        plain, _ = pool.submit(soak, steps, every, True).result()
    sys.stdout.write(f"{summary}\n\n")
    results = [
        asdict(sample) | {"plain_bytes": other.process_bytes} for sample, other in zip(samples, plain, strict=True)
    ]
    rows, text = rows_of(results), verdict(samples)
    write_results(NAME, f"{steps} steps of random lengths under pooch.auto: {text}", rows, results, output)
    if picture is not None:
        draw(json.loads((output / f"{NAME}.json").read_text())["results"], picture)
    sys.stdout.write(f"{markdown_table(rows)}\n\n{text}; {time.monotonic() - begin_s:.0f} s\n")
    return int(bool(grown(samples)))
