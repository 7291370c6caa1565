"""Whether planning keeps its time limit, by the clock: how long it took under limits that are too short for it.

    python -m benchmarks.time_limits [--limit 1 ...] [--budget 0.45] [--turns 3]

The recorded profiles, and two synthetic language models, are planned under each limit, several times. A limit may be
passed by a fifth; ends with exit code 1 where it is once passed by more. Run it on a quiet machine: it reads the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.samples import told
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.api.smallest import smallest_budget
from pooch.ir import Profile
from tests.planner.networks import PCIE_16, gpt2
from tests.planner.support import make_plan

LIMITS_S = (1.0, 2.0, 5.0, 10.0)
ALLOWED = 1.2
LAYERS = (80, 370)


def profiles(folder: Path) -> Iterator[tuple[str, Profile]]:
    """What is planned, by name."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, Profile.load(path)
    for layers in LAYERS:
        yield f"synthetic, {layers} layers", gpt2(layers=layers, link=PCIE_16, speed=50, fine=True)


def measure(name: str, profile: Profile, share: float, limit_s: float, turns: int) -> dict[str, Any]:
    """Plans under one limit."""
    return {
        "profile": name,
        "activations": len(Dataflow(profile).activations),
        "share": share,
        "limit_s": limit_s,
        "turns": [_planned(profile, share, limit_s) for _ in range(turns)],
    }


def _planned(profile: Profile, share: float, limit_s: float) -> dict[str, Any]:
    began_s = time.monotonic()
    dataflow = Dataflow(profile)
    budget_bytes = int(share * profile.peak_bytes)
    planned = make_plan(dataflow, budget_bytes, StageEvaluator(dataflow), time_limit_s=limit_s)
    return {
        "taken_s": time.monotonic() - began_s,
        "gap": planned.gap,
        "slowdown": planned.timeline.step_ms / profile.step_ms,
        "status": planned.status,
    }


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: the longest of the turns, as it is what has to keep the limit, and the worst plan of them."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    turns = result["turns"]
    taken_s = [turn["taken_s"] for turn in turns]
    return {
        "profile": result["profile"],
        "activations": result["activations"],
        "budget": f"{result['share']:.1%}",
        "limit, s": f"{result['limit_s']:g}",
        "taken, s": f"{max(taken_s):.2f}",
        "median, s": told(taken_s, ".2f"),
        "kept": "yes" if max(taken_s) <= ALLOWED * result["limit_s"] else "NO",
        "gap": f"{max(turn['gap'] for turn in turns):.2%}",
        "slowdown": f"{max(turn['slowdown'] for turn in turns):.4f}",
        "status": ", ".join(dict.fromkeys(turn["status"] for turn in turns)),
    }


def main() -> int:
    """Measure, print, write; exit code 1 where a limit was passed by more than a fifth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", action="append", type=float, help=f"seconds, several times (default: {LIMITS_S})")
    parser.add_argument("--budget", type=float, default=0.45, help="share of the in-core peak")
    parser.add_argument("--turns", type=int, default=3, help="plans under each limit")
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results = []
    for name, profile in profiles(arguments.profiles):
        smallest = smallest_budget(profile) / profile.peak_bytes
        share = max(arguments.budget, smallest + 0.01)  # where so little cannot be kept, just above what can
        for limit_s in arguments.limit or LIMITS_S:
            tell(f"{name}: {share:.1%} in {limit_s:g} s")
            results.append(measure(name, profile, share, limit_s, arguments.turns))
    rows = rows_of(results)
    write_results("time-limits", "Planning under time limits", rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")
    return int(any(row["kept"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
