"""Pooch beside what a user would pick instead, at the peak of each.

    python -m benchmarks.peers [--workload vit ...] [--minutes 60] [--turns 7] [--again]

Every method trains every workload in a process of its own; then Pooch gets the measured peak of each method, less 0.5%,
as its budget, or its smallest feasible budget where that is more. Peaks are counted by the allocator; steps take turns
with plain steps of the same process, Pooch's with those of the method too; loss and gradients are compared bitwise.
Cells that were measured before are not measured again, and the time limit ends between two cells, so the command can be
called until the table is full. The compiler is listed apart: it changes the kernels, so neither its time nor its bits
compare.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.methods import MEANING, ways
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.samples import ratios, told
from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results

NAME, TITLE = "peers-cpu", "Pooch beside what a user would pick instead"
BUDGET_SHARE = 0.995  # of the peak of a method
COMPILED = {"vit": (0.2, 0.5, 0.8), "llama": (0.2, 0.5, 0.8), "densenet": (0.2, 0.5, 0.8)}
CELL_TIME_LIMIT_S = 600
SMALLEST = " (smallest)"
Found = dict[str, Any]


def measured(name: str, method: str, budget: float, turns: int, beside: str = "") -> Found:
    """Measure one cell in a child process."""
    tell(f"{name}: {method}{f' {budget:,.0f}' if budget > 1 else f' {budget}' if budget else ''}")
    command = [sys.executable, "-m", "benchmarks.peers.cell", name, method, str(budget), "--turns", str(turns)]
    command += ["--beside", beside] if beside else []
    empty = {"workload": name, "method": method, "budget_bytes": budget, "beside": beside, "samples": []}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CELL_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return empty | {"refusal": f"not done within {CELL_TIME_LIMIT_S} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return empty | {"refusal": next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:300]}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def cells(name: str, known: list[Found], turns: int) -> Iterator[Found]:
    """Yield the cells of a workload that are not known yet, measured."""
    have = {(cell["method"], cell["budget_bytes"], cell["beside"]): cell for cell in known}
    for method in ways(WORKLOADS[name]()):
        if (method, 0, "") not in have:
            have[method, 0, ""] = measured(name, method, 0, turns)
            yield have[method, 0, ""]
        peak_bytes = have[method, 0, ""].get("peak_bytes", 0)
        if method == "plain" or not peak_bytes:
            continue
        budget_bytes = int(BUDGET_SHARE * peak_bytes)
        if ("pooch", budget_bytes, method) not in have:
            yield measured(name, "pooch", budget_bytes, turns, method)
    for share in COMPILED.get(name, ()):
        if ("compile", share, "") not in have:
            yield measured(name, "compile", share, turns)


def rows_of(results: list[Found]) -> list[Row]:
    """One row for each method, with Pooch at its peak beside it."""
    rows: list[Row] = []
    for name in dict.fromkeys(cell["workload"] for cell in results):
        mine = [cell for cell in results if cell["workload"] == name]
        plain = next((cell for cell in mine if cell["method"] == "plain"), None)
        planned = {cell["beside"]: cell for cell in mine if cell["method"] == "pooch"}
        for cell in mine:
            if cell["method"] in ("plain", "pooch", "compile") or plain is None or not plain.get("peak_bytes"):
                continue
            rows.append(_row(cell, plain, planned.get(cell["method"])))
    return rows


def _row(cell: Found, plain: Found, mine: Found | None) -> Row:
    peer = cell["method"]
    row: dict[str, object] = {
        "workload": cell["workload"],
        "method": peer,
        "peak / plain": _share(cell, plain),
        "time / plain": _time(mine or cell, peer) or _time(cell, peer),
        "same bits": _bits(cell),
        "RSS": _rss(cell),
        "Pooch: peak / plain": "",
        "Pooch: time / plain": "",
        "predicted": "",
        "Pooch: same bits": "",
        "Pooch: RSS": "",
        "Pooch: before the first step": "",
        "Pooch's time / the method's": "",
    }
    if mine is None:
        return row
    if mine.get("refusal"):
        return row | {"Pooch: time / plain": mine["refusal"].split(":")[0][:60]}
    is_smallest = mine["planned_bytes"] > mine["budget_bytes"]
    return row | {
        "Pooch: peak / plain": _share(mine, plain) + (SMALLEST if is_smallest else ""),
        "Pooch: time / plain": _time(mine, "pooch"),
        "predicted": f"{mine['predicted_ratio']:.3f}",
        "Pooch: same bits": _bits(mine),
        "Pooch: RSS": _rss(mine),
        "Pooch: before the first step": f"{mine['before_s']:.0f} s",
        "Pooch's time / the method's": _time(mine, "pooch", peer),
    }


def _share(cell: Found, plain: Found) -> str:
    return f"{cell['peak_bytes'] / plain['peak_bytes']:.3f}" if cell.get("peak_bytes") else cell["refusal"]


def _time(cell: Found, method: str, over: str = "plain") -> str:
    return told(ratios(cell["samples"], method, over), ".3f", half_form=".2f") if cell["samples"] else ""


def _bits(cell: Found) -> str:
    return "" if cell.get("refusal") else "yes" if cell["same_bits"] else "no"


def _rss(cell: Found) -> str:
    return "" if cell.get("refusal") else f"{cell['steps_rss_bytes'] / 2**20:.0f} MiB"


def compiled_rows(results: list[Found]) -> list[Row]:
    """The rows of the compiler."""
    plain = {cell["workload"]: cell for cell in results if cell["method"] == "plain"}
    return [
        {
            "workload": cell["workload"],
            "activation_memory_budget": cell["budget_bytes"],
            "peak / plain": _share(cell, plain[cell["workload"]]),
            "time / plain": _time(cell, "compile"),
            "same bits": _bits(cell),
            "before the first step": f"{cell.get('before_s', 0):.0f} s",
        }
        for cell in results
        if cell["method"] == "compile" and plain.get(cell["workload"], {}).get("peak_bytes")
    ]


def main() -> None:
    """Measure what is missing, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--minutes", type=float, default=60, help="no cell is begun after this time")
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each kind in a cell")
    parser.add_argument("--again", action="store_true", help="measure cells again that are known")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.workload or list(WORKLOADS)
    results = earlier_results(NAME, arguments.output, names if arguments.again else [])
    end_s = time.monotonic() + 60 * arguments.minutes
    for name in names:
        for cell in cells(name, [each for each in results if each["workload"] == name], arguments.turns):
            results.append(cell)
            _write(results, arguments.output)
            if time.monotonic() > end_s:
                tell("the time is over: call again for the rest")
                return
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")


def _write(results: list[Found], folder: Path) -> None:
    rows = rows_of(results)
    if not rows:
        return
    more = {"The methods": [{"method": name, "meaning": text} for name, text in MEANING.items()]}
    if compiled_rows(results):
        more["The compiler"] = compiled_rows(results)
    write_results(NAME, TITLE, rows, results, folder, more)


if __name__ == "__main__":
    main()
