"""How planning grows: activations against seconds and memory, on synthetic language models of more and more layers.

    python -m benchmarks.planner_growth [--activations 500 ...] [--budget 0.5] [--time-limit 120]

Each size is planned in a process of its own, so that its memory is its own. Seconds of the processor are told beside
those of the clock: on a busy machine only the former mean something.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

from benchmarks.tables import Row, markdown_table, write_results
from pooch.ir.dataflow import Dataflow
from pooch.planner import make_plan
from pooch.session.evaluation import StageEvaluator
from tests.planner.networks import PCIE_16, gpt2

SIZES = (250, 500, 1000, 2000, 5000, 10000)
PER_LAYER = 27  # activations of a layer of the synthetic model


def measure(activations: int, share: float, time_limit_s: float) -> dict[str, object]:
    """Plan one size; one row."""
    profile = gpt2(layers=round(activations / PER_LAYER), link=PCIE_16, speed=50, fine=True)
    dataflow = Dataflow(profile)
    before_mib, began_s, began_cpu_s = _memory_mib(), time.monotonic(), time.process_time()
    evaluator = StageEvaluator(dataflow)
    planned = make_plan(dataflow, int(share * profile.peak_bytes), evaluator, time_limit_s=time_limit_s)
    return {
        "activations": len(dataflow.activations),
        "ops": len(profile.ops),
        "layers": round(activations / PER_LAYER),
        "seconds": round(time.monotonic() - began_s, 2),
        "processor_seconds": round(time.process_time() - began_cpu_s, 2),
        "memory_mib": round(_memory_mib() - before_mib, 1),
        "gap": round(planned.gap, 5),
        "status": planned.status,
        "slowdown": round(planned.timeline.step_ms / profile.step_ms, 4),
    }


def _memory_mib() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Seconds and memory against activations, both axes logarithmic in size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [row["activations"] for row in rows]
    left.plot(sizes, [row["processor_seconds"] for row in rows], "o-")
    left.set(xscale="log", yscale="log", xlabel="activations", ylabel="seconds of the processor", title="planning time")
    right.plot(sizes, [row["memory_mib"] for row in rows], "o-")
    right.set(xscale="log", xlabel="activations", ylabel="MiB added", title="memory of planning", ylim=(0, None))
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        axes.minorticks_off()
    left.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every size, print, write JSON, table and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", action="append", type=int, help=f"default: {SIZES}")
    parser.add_argument("--budget", type=float, default=0.5, help="share of the in-core peak")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for size in arguments.activations or SIZES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (size, arguments.budget, arguments.time_limit)))
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    table: list[Row] = [dict(row) for row in rows]
    write_results("planner-growth", "Planning time and memory as models grow", table, rows, arguments.output)
    draw(rows, arguments.output / "planner-growth.png")
    sys.stdout.write(markdown_table(table) + "\n")


if __name__ == "__main__":
    main()
