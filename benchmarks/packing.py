"""Packs instances of dynamic storage allocation: arena over the highest sum of live bytes, by policy and CPU seconds.

    python -m benchmarks.packing FOLDER [--seconds 2 10 30] [--peer-seconds 10] [--peer-python PYTHON] [--output DIR]

FOLDER holds CSV files with the columns id, lower, upper, size[, alignment]. Four instances of 18,692 blocks that the
benchmark makes itself come on top. OmniMalloc is measured beside ours if PYTHON (default: this interpreter) can import
it (`pip install omnimalloc`); its layouts are verified by our verifier. All seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.packing_instances import even_blocks, random_blocks, training_step, uneven_blocks
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.packing import Block, Layout, bound_of, pack, verify
from pooch.packing.files import load_blocks

NAME, TITLE = "packing", "Blocks in one arena: arena over the highest sum of live bytes"
LARGE = 18_692
RULES = ("sekiyama", "greedy_by_size")
PEERS = ("simulated_annealing", "tabu_search", "supermalloc")

# Runs in the peer's interpreter. Its limits are elapsed seconds, so on a busy machine a second run gets more of them.
PEER = """
import json, sys, time
from omnimalloc import Allocation, allocate, set_max_threads
from omnimalloc.allocators import SimulatedAnnealingAllocator, SupermallocAllocator, TabuSearchAllocator
set_max_threads(1)
many = 10**9
make = {"simulated_annealing": lambda s: SimulatedAnnealingAllocator(max_iterations=many, timeout=s),
        "tabu_search": lambda s: TabuSearchAllocator(max_iterations=many, timeout=s),
        "supermalloc": lambda s: SupermallocAllocator(timeout=s, num_threads=1)}[sys.argv[1]]
asked = json.load(sys.stdin)
blocks = [Allocation(k, size, lower, upper) for k, (lower, upper, size) in enumerate(asked["blocks"])]
def run(limit_s):
    started = time.process_time()
    placed = allocate(blocks, make(limit_s))
    seconds = time.process_time() - started
    offsets = {each.id: each.offset for each in placed}
    return [offsets[k] for k in range(len(blocks))], seconds
offsets, seconds = run(asked["seconds"])
if seconds < 0.9 * asked["seconds"]:
    offsets, seconds = run(min(asked["seconds"] ** 2 / max(seconds, 0.01), 6 * asked["seconds"]))
json.dump({"offsets": offsets, "seconds": seconds}, sys.stdout)
"""


def instances_in(folder: Path) -> dict[str, list[Block]]:
    """Return the instances of a folder by name, and those of our own making."""
    found = {path.stem: load_blocks(path) for path in sorted(folder.glob("*.csv"))}
    found[f"made: training step, {LARGE}"] = training_step(LARGE // 6 + 1, per_layer=3, seed=1)[:LARGE]
    found[f"made: random lifetimes, {LARGE}"] = random_blocks(LARGE, times=4000)
    found[f"made: even sizes and lifetimes, {LARGE}"] = even_blocks(LARGE)
    found[f"made: log-normal sizes, {LARGE}"] = uneven_blocks(LARGE)
    return found


def measure(name: str, blocks: Sequence[Block], seconds: Sequence[float]) -> dict[str, Any]:
    """Pack an instance by every policy, and by `ours` under every limit."""
    result: dict[str, Any] = {"instance": name, "blocks": len(blocks), "bound_bytes": bound_of(blocks), "runs": []}
    for policy, limit_s in [*((rule, 1.0) for rule in RULES), *(("ours", limit_s) for limit_s in seconds)]:
        started_s = time.process_time()
        layout = pack(blocks, policy=policy, time_limit_s=limit_s)
        used_s = time.process_time() - started_s
        verify(blocks, layout)
        limit = limit_s if policy == "ours" else None
        result["runs"].append(
            {"policy": policy, "limit_s": limit, "seconds": used_s, "arena_bytes": layout.arena_bytes}
        )
        tell(f"{name}, {policy}: {layout.ratio:.4f} in {used_s:.1f} CPU s")
    return result


def peer_runs(python: str, blocks: Sequence[Block], limit_s: float) -> list[dict[str, Any]]:
    """Pack by the peer's searches; none where it cannot be imported."""
    if subprocess.run([python, "-c", "import omnimalloc"], capture_output=True, check=False).returncode:
        return []
    runs = []
    asked = json.dumps({"seconds": limit_s, "blocks": [(each.lower, each.upper, each.size_bytes) for each in blocks]})
    for name in PEERS:
        done = subprocess.run([python, "-c", PEER, name], input=asked, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        arena = max(offset + block.size_bytes for offset, block in zip(answer["offsets"], blocks, strict=True))
        verify(blocks, Layout(tuple(answer["offsets"]), arena, bound_of(blocks), name))
        runs.append({"policy": name, "limit_s": limit_s, "seconds": answer["seconds"], "arena_bytes": arena})
        tell(f"  OmniMalloc {name}: {arena / bound_of(blocks):.4f} in {answer['seconds']:.1f} CPU s")
    return runs


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: a row per instance."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    def told(run: Mapping[str, Any]) -> str:
        return f"{run['arena_bytes'] / result['bound_bytes']:.4f} ({run['seconds']:.1f} s)"

    row: dict[str, object] = {"instance": result["instance"], "blocks": result["blocks"]}
    for run in result["runs"]:
        row[f"ours, {run['limit_s']:g} s" if run["policy"] == "ours" else run["policy"]] = told(run)
    peers = result.get("peers")
    if peers:
        best = min(peers, key=lambda run: run["arena_bytes"])
        row[f"best of OmniMalloc, {best['limit_s']:g} s each"] = f"{told(best)}, {best['policy']}"
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, nargs="+", default=[2.0, 10.0, 30.0])
    parser.add_argument("--peer-seconds", type=float, default=10.0)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-blocks", type=int, default=2000, help="the most blocks of an instance that peers get")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    results = []
    for name, blocks in instances_in(given.folder).items():
        result = measure(name, blocks, given.seconds)
        if len(blocks) <= given.peer_blocks and given.peer_seconds > 0:
            result["peers"] = peer_runs(given.peer_python, blocks, given.peer_seconds)
        results.append(result)
        write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
