"""A thousand small planned steps: tensors, process memory, threads, file descriptors and the tier have to stay flat.

    python -m benchmarks.soak [--steps 1000] [--output benchmarks/results]
    python -m benchmarks.soak --ragged [--steps 10000] [--picture docs/soak.png]
    python -m benchmarks.soak --interrupted [--steps 5000] [--picture docs/soak_interrupted.png]

Every tenth forward has no backward pass and every twentieth raises, as in users' loops. Writes ten rows as a table and
fifty samples as a picture; exit code 1 if something grows once the first tenth of the steps is over. `--ragged` does so
under `pooch.auto`, with lengths that hardly repeat: see `soak_ragged.py`. `--interrupted` adds evaluations,
checkpoints, failures and Ctrl-C: see `soak_interrupted.py`.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks import soak_interrupted, soak_ragged
from benchmarks.handmade import tight_plan, tiny_profile
from benchmarks.tables import Row, markdown_table, write_results
from pooch.analysis.dataflow import Dataflow
from pooch.executor import apply_plan
from pooch.executor.engines.spill_file import SpillFile
from pooch.ir import Choice, Plan, Profile
from pooch.ir.files import replace_file
from pooch.torchtools.memory_trace import live_bytes

# What the C library's allocator may keep for itself while it settles.
ALLOWED_PROCESS_GROWTH_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds after some steps.

    Attributes:
        live_bytes: of tensors. process_bytes: resident memory. tier_bytes: of spill files, which have no name.
    """

    steps: int
    live_bytes: int
    process_bytes: int
    threads: int
    descriptors: int
    tier_bytes: int


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
    descriptors = list(Path("/proc/self/fd").iterdir())
    resident = psutil.Process(os.getpid()).memory_info().rss
    live = live_bytes(torch.device("cpu"))
    return Sample(steps, live, resident, threading.active_count(), len(descriptors), _tier_bytes())


def _tier_bytes() -> int:
    """Room of the spill files that are open: they have no name by which they could be told from other open files."""
    files = (each for each in gc.get_objects() if type(each) is SpillFile)
    return sum(os.fstat(file.descriptor).st_size for file in files)


def growth(samples: list[Sample]) -> list[str]:
    """What grew between the first sample and the last one."""
    first, last = samples[0], samples[-1]
    found = [
        f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
        for name in ("live_bytes", "threads", "descriptors", "tier_bytes")
        if getattr(last, name) > getattr(first, name)
    ]
    if last.process_bytes - first.process_bytes > ALLOWED_PROCESS_GROWTH_BYTES:
        found.append(f"process memory grew from {first.process_bytes} to {last.process_bytes} bytes")
    return found


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: every fifth sample of fifty."""
    return [
        {
            "steps": result["steps"],
            "live tensors": f"{result['live_bytes']} B",
            "process": f"{result['process_bytes'] / 2**20:.1f} MiB",
            "threads": result["threads"],
            "file descriptors": result["descriptors"],
            "spill files": f"{result['tier_bytes']} B",
        }
        for result in results[:: max(1, len(results) // 10)]
    ]


def draw(samples: list[Sample], path: Path) -> None:
    """The curves, one above the other."""
    from matplotlib.figure import Figure

    curves = {
        "live tensors (KiB)": [sample.live_bytes / 2**10 for sample in samples],
        "process (MiB)": [sample.process_bytes / 2**20 for sample in samples],
        "threads": [sample.threads for sample in samples],
        "file descriptors": [sample.descriptors for sample in samples],
        "spill files (KiB)": [sample.tier_bytes / 2**10 for sample in samples],
    }
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True)
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot([sample.steps for sample in samples], values)
        axis.set_ylim(0, 1.2 * max(values))
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1].set_xlabel("steps")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    replace_file(path, drawn.getvalue())


def main() -> int:
    """Train, print, write; exit code 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--interrupted", action="store_true")
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.ragged:
        return soak_ragged.run(arguments.steps or 10_000, arguments.output, arguments.picture)
    if arguments.interrupted:
        return soak_interrupted.run(arguments.steps or 5000, arguments.output, arguments.picture)
    steps = arguments.steps or 1000
    torch.set_num_threads(1)
    samples = soak(steps, max(1, steps // 50))
    results = [asdict(sample) for sample in samples]
    rows = rows_of(results)
    grown = growth(samples[len(samples) // 10 :])  # the C library's allocator and the interpreter settle at first
    verdict = "; ".join(grown) if grown else "nothing grew"
    title = f"{steps} planned steps that swap and recompute: {verdict}"
    write_results("soak-cpu", title, rows, results, arguments.output)
    draw(samples, arguments.output / "soak-cpu.png")
    sys.stdout.write(f"{markdown_table(rows)}\n\n{verdict}\n")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
