"""What PyTorch's caching allocator reserves for a step, beside the step's packed arena, on the simulated CUDA device.

    python -m benchmarks.simulated_arena [--workload NAME ...]

The same steps, plain and planned at 60% of the in-core peak (or at the smallest budget that there is), each training in
a process of its own: under PyTorch's allocator as it is, under the same with `expandable_segments:True`, and under
Pooch's allocator, which records what a step asks for, packs it, and serves later steps from the arena. Kernels
compute nothing there. Bytes are those of PyTorch's real host code and of its real allocator; times mean nothing and are
not kept. No GPU takes part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.ground.units import format_bytes
from tests.simulated_cuda.environment import ROOT, TORCH, VENV, set_up_or_tell, variables
from tests.simulated_cuda.peaks import BATCH_SIZES
from tests.simulated_cuda.suite import AT_ONCE

NAME = "simulated-arena"
TITLE = f"Reserved bytes beside packed arenas, on the simulated CUDA device ({TORCH.replace('==', ' ')}; no GPU)"
WORKLOADS: Mapping[str, int] = {
    **{name: BATCH_SIZES[name] for name in ("resnet50@small", "gpt2@small", "unet3d@small", "lstm@small")},
    "resnet50": 16,  # at its real size: where kernels do nothing, large tensors take no longer
}
DEVICE_MIB = 16384
WAYS: Mapping[str, tuple[str, bool]] = {  # what the process does, and whether segments are expandable
    "default": ("caching", False),
    "expandable segments": ("caching", True),
    "arena": ("arena", False),
}
Result = Mapping[str, Any]


def child(way: str, *arguments: str, expandable: bool = False) -> dict[str, Any]:
    """Run `arena_bytes` on the device and return what it found.

    Raises:
        RuntimeError: it failed, or the device found a mistake.
    """
    environment = variables(False, DEVICE_MIB, expandable_segments=expandable) | AT_ONCE
    command = [str(VENV / "bin/python"), "-m", "tests.simulated_cuda.arena_bytes", way, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    mistakes = found.pop("mistakes")
    if mistakes:
        raise RuntimeError(f"{' '.join(command[2:])}: the device found {mistakes}")
    return found


def measured(name: str, batch_size: int, kind: str, *paths: str) -> dict[str, Any]:
    """Train under every allocator."""
    found: dict[str, Any] = {"workload": name, "batch_size": batch_size, "kind": kind}
    for way, (what, expandable) in WAYS.items():
        tell(f"{name}, {kind}: {way}")
        found[way] = child(what, name, str(batch_size), *paths, expandable=expandable)
    return found


def results_of(name: str, batch_size: int) -> list[dict[str, Any]]:
    """Plain training, and training under a plan."""
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        tell(f"{name}: planning")
        predicted = child("plan", name, str(batch_size), path)
        share = predicted["predicted_peak_bytes"] / predicted["in_core_peak_bytes"]
        plain = measured(name, batch_size, "plain")
        planned = measured(name, batch_size, f"planned at {share:.0%}", path)
    return [plain, planned | {"predicted": predicted}]


def packed_bytes(result: Result) -> int:
    """What stays between the steps, and the arena."""
    own = result["arena"]
    return int(own["staying_bytes"] + own["arena"]["arena_bytes"])


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Reserved bytes of each allocator over what the packed step takes."""

    def row_of(result: Result) -> Row:
        packed, own = packed_bytes(result), result["arena"]
        row: dict[str, object] = {
            "workload": result["workload"],
            "": result["kind"],
            "live at once": format_bytes(own["rest"]["allocated"]),
            "of that, stays": format_bytes(own["staying_bytes"]),
            "packed": format_bytes(packed),
            "packed / live": f"{packed / own['rest']['allocated']:.3f}",
        }
        for way in ("default", "expandable segments"):
            reserved = result[way]["rest"]["reserved"]
            row[f"reserved, {way}"] = format_bytes(reserved)
            row[f"{way} / packed"] = f"{reserved / packed:.3f}"
        row["reserved, Pooch's"] = format_bytes(own["rest"]["reserved"])
        row["in its first steps"] = format_bytes(own["first"]["reserved"])
        return row

    return [row_of(result) for result in results]


def served_rows(results: Sequence[Result]) -> list[Row]:
    """What the arena served."""

    def row_of(result: Result) -> Row:
        arena = result["arena"]["arena"]
        counters = arena["counters"]
        fallbacks = counters["unrecognised"] + counters["collided"] + counters["beyond"]
        return {
            "workload": result["workload"],
            "": result["kind"],
            "arena": format_bytes(arena["arena_bytes"]),
            "over the bound": f"{arena['arena_bytes'] / arena['bound_bytes']:.4f}",
            "blocks": arena["blocks"],
            "steps": counters["steps"],
            "at their place": f"{counters['placed'] / (counters['placed'] + fallbacks):.3%}",
            "on other streams": counters["elsewhere"],
        }

    return [row_of(result) for result in results]


def main() -> int:
    """Measure, and write the results. Exit code 0 also where the device cannot be set up, which is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("-o", "--folder", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    if not set_up_or_tell():
        return 0
    chosen = given.workload or list(WORKLOADS)
    results = earlier_results(NAME, given.folder, chosen)
    for name in chosen:
        results += results_of(name, WORKLOADS[name])
        results.sort(key=lambda result: list(WORKLOADS).index(result["workload"]))
        more = {"What the arena served": served_rows(results)}
        write_results(NAME, TITLE, rows_of(results), results, given.folder, more)
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
