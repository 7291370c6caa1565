"""Packs MiniMalloc's challenging instances: whether and when each fits into the capacity that MiniMalloc reaches.

    python -m benchmarks.traces.minimalloc FOLDER [--time-limit 30] [--output DIR]

FOLDER is `benchmarks/challenging` of https://github.com/google/minimalloc, whose files bear their capacity in their
names. All seconds are CPU seconds of one thread; those of MiniMalloc are published ones, of another machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.packing import pack, verify
from pooch.packing.files import load_blocks

NAME, TITLE = "traces-minimalloc", "MiniMalloc's challenging instances: CPU seconds until an arena of 1 MiB"
# The table of slide 22 of img/minimalloc.slides.pdf in its repository (ASPLOS 2023), in ms; TelaMalloc and a mixed
# integer program took more than an hour for each.
PUBLISHED_MS = {
    "A": 4910, "B": 3661, "C": 637, "D": 2674, "E": 3717, "F": 5358, "G": 1181, "H": 1808, "I": 3908, "J": 883, "K": 628
}  # fmt: skip


def measure(path: Path, time_limit_s: float) -> dict[str, Any]:
    """Pack an instance until it fits into its capacity, and again without one."""
    name, _, capacity = path.stem.partition(".")
    blocks = load_blocks(path)
    result: dict[str, Any] = {"instance": name, "blocks": len(blocks), "capacity_bytes": int(capacity)}
    result["published_s"] = PUBLISHED_MS[name] / 1000 if name in PUBLISHED_MS else None
    for run, capacity_bytes in (("capacity", int(capacity)), ("smallest", 0)):
        started_s = time.thread_time()
        layout = pack(blocks, time_limit_s=time_limit_s, capacity_bytes=capacity_bytes)
        seconds = time.thread_time() - started_s
        verify(blocks, layout)
        result["bound_bytes"] = layout.bound_bytes
        result[run] = {"arena_bytes": layout.arena_bytes, "seconds": seconds, "rounds": layout.rounds}
        tell(f"{name}, {run}: {layout.arena_bytes} of {capacity} bytes in {seconds:.2f} CPU s")
    return result


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: a row per instance."""
    return [
        {
            "instance": result["instance"],
            "blocks": result["blocks"],
            "live bytes / capacity": f"{result['bound_bytes'] / result['capacity_bytes']:.4f}",
            "fits": "yes" if result["capacity"]["arena_bytes"] <= result["capacity_bytes"] else "no",
            "ours, s": f"{result['capacity']['seconds']:.2f}",
            "MiniMalloc, published, s": f"{result['published_s']:.2f}",
            "smallest arena of ours / bound": f"{result['smallest']['arena_bytes'] / result['bound_bytes']:.4f}",
            "after, s": f"{result['smallest']['seconds']:.2f}",
        }
        for result in results
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    results = [measure(path, given.time_limit) for path in sorted(given.folder.glob("*.csv"))]
    write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
