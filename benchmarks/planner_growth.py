"""How planning grows: activations against seconds and memory, on synthetic language models of more and more layers.

    python -m benchmarks.planner_growth [--activations 500 ...] [--budget 0.5] [--time-limit 120] [--turns 3]

Each plan is made in a process of its own, so that its memory is its own; figures are medians, with the middle half of
the turns in brackets. Seconds of the processor are told beside those of the clock: on a busy machine only the former
mean something.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.samples import told
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import make_plan

SIZES = (250, 500, 1000, 2000, 5000, 10000)
PER_LAYER = 27  # activations of a layer of the synthetic model


def measure(activations: int, share: float, time_limit_s: float) -> dict[str, Any]:
    """Plan one size once."""
    profile = gpt2(layers=round(activations / PER_LAYER), link=PCIE_16, speed=50, fine=True)
    dataflow = Dataflow(profile)
    before_mib, began_s, began_cpu_s = _memory_mib(), time.monotonic(), time.process_time()
    evaluator = StageEvaluator(dataflow)
    planned = make_plan(dataflow, int(share * profile.peak_bytes), evaluator, time_limit_s=time_limit_s)
    return {
        "activations": len(dataflow.activations),
        "ops": len(profile.ops),
        "layers": round(activations / PER_LAYER),
        "seconds": time.monotonic() - began_s,
        "processor_seconds": time.process_time() - began_cpu_s,
        "memory_mib": _memory_mib() - before_mib,
        "gap": planned.gap,
        "status": planned.status,
        "slowdown": planned.timeline.step_ms / profile.step_ms,
    }


def _memory_mib() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows_of(results: Sequence[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """The table: a line for the turns of each size."""
    return [_row(turns) for turns in results]


def _row(turns: Sequence[Mapping[str, Any]]) -> Row:
    return {
        **{key: turns[0][key] for key in ("activations", "ops", "layers")},
        "seconds": told((turn["seconds"] for turn in turns), ".2f"),
        "processor_seconds": told((turn["processor_seconds"] for turn in turns), ".2f"),
        "memory_mib": told((turn["memory_mib"] for turn in turns), ".1f"),
        "gap": round(max(turn["gap"] for turn in turns), 5),
        "status": ", ".join(dict.fromkeys(turn["status"] for turn in turns)),
        "slowdown": round(max(turn["slowdown"] for turn in turns), 4),
    }


def draw(results: Sequence[Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Medians of seconds and memory against activations, both axes logarithmic in size."""
    from matplotlib.figure import Figure

    def medians(what: str) -> list[float]:
        return [statistics.median(turn[what] for turn in turns) for turns in results]

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = medians("activations")
    left.plot(sizes, medians("processor_seconds"), "o-")
    left.set(xscale="log", yscale="log", xlabel="activations", ylabel="seconds of the processor", title="planning time")
    right.plot(sizes, medians("memory_mib"), "o-")
    right.set(xscale="log", xlabel="activations", ylabel="MiB added", title="memory of planning", ylim=(0, None))
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes], rotation=45)
        axes.minorticks_off()
    left.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every size, print, write JSON, table and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", action="append", type=int, help=f"default: {SIZES}")
    parser.add_argument("--budget", type=float, default=0.5, help="share of the in-core peak")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--turns", type=int, default=3, help="plans of each size")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results: list[list[dict[str, Any]]] = []
    for size in arguments.activations or SIZES:
        results.append([])
        for _ in range(arguments.turns):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results[-1].append(pool.apply(measure, (size, arguments.budget, arguments.time_limit)))
            tell(json.dumps(results[-1][-1]))
    rows = rows_of(results)
    write_results("planner-growth", "Planning time and memory as models grow", rows, results, arguments.output)
    draw(results, arguments.output / "planner-growth.png")
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()
