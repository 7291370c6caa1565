"""Train every loop of others plainly and under budgets, and write the page docs/loops.md.

    python -m benchmarks.loops [--loop NAME ...] [--again] [--trainings N] [--minutes M] [--page-only]

Each training runs in a process of its own with a time limit. What came of a loop is one line of
benchmarks/results/loops-cpu.jsonl, written when its last training has ended, so a run goes on where an earlier one
stopped. A loop whose package is missing is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.apart import in_a_process, stored
from benchmarks.architectures import outcome
from benchmarks.loops.catalogue import LOOPS, NEEDS
from benchmarks.loops.child import run
from benchmarks.loops.page import page
from benchmarks.setups.counting import preloading
from benchmarks.tables import tell

RESULTS = Path("benchmarks/results/loops-cpu.jsonl")
PAGE = Path("docs/loops.md")
FOUND = Path(__file__).with_name("found.md")  # told by hand
LIMIT_S = 180
TRAININGS = (("auto", 0.75), ("exec", 0.5), ("exec", 0.75), ("auto", 0.5))
PRELOADED = ("torch", "numpy", "pooch.autopilot.finding", "benchmarks.loops.child")
OPTIONAL = ("transformers.trainer", "datasets", "peft", "trl", "lightning")


def answer_to(job: dict[str, Any]) -> dict[str, Any]:
    """What a training in a process of its own answers, or why there is no answer."""
    return in_a_process(run, job, LIMIT_S)


def measured(name: str, known: dict[str, Any] | None, trainings: int) -> dict[str, Any]:
    """Train a loop plainly and under budgets.

    Args:
        name: Of the loop.
        known: Its line so far, if there is one.
        trainings: How many of them under a budget.
    """
    plain = answer_to({"name": name, "way": "plain", "budget_bytes": None})
    line: dict[str, Any] = {"name": name, "plain": {"failure": plain.get("failure", "")}, "governed": []}
    line["governed"] = [] if known is None else known["governed"]
    if "failure" in plain:
        return line
    needed = answer_to({"name": name, "way": "needs", "budget_bytes": None})
    line["plain"] |= {
        "need_bytes": needed.get("need_bytes", 0),
        "need_operator": needed.get("need_operator", needed.get("failure", "")),
        "held_bytes": needed.get("held_bytes", 0),
        "steps": len(plain["steps"]),
        "peak_bytes": outcome.peak_bytes(plain),
        "stays_bytes": outcome.stays_bytes(plain),
        "thread_ms": plain["thread_ms"],
    }
    for way, share in TRAININGS[len(line["governed"]) : trainings]:
        budget_bytes = int(share * outcome.peak_bytes(plain))
        found = answer_to({"name": name, "way": way, "budget_bytes": budget_bytes})
        cell = outcome.governed_cell(way, share, budget_bytes, plain, found)
        if cell.get("differences") and not repeats(name, plain):
            cell["failure"] = "plain training does not repeat its own numbers"
        line["governed"].append(cell)
        tell(f"{name}: {outcome_in_short(cell)}")
    return line


def repeats(name: str, plain: dict[str, Any]) -> bool:
    """Whether plain training in another process has the same numbers."""
    again = answer_to({"name": name, "way": "plain", "budget_bytes": None})
    return not again.get("failure") and not outcome.differences(plain, again)


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", action="append", dest="loops", choices=LOOPS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no loop later than this")
    parser.add_argument("--trainings", type=int, default=len(TRAININGS), help="fewer, for a first look at all loops")
    parser.add_argument("--again", action="store_true", help="measure again what is stored")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.page_only:
        sweep(arguments)
    PAGE.write_text(page(stored(arguments.results), FOUND.read_text()))
    return 0


def sweep(arguments: argparse.Namespace) -> None:
    """Measure what is not stored yet."""
    os.environ.update(preloading(dict(os.environ)) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    there = [name for name in OPTIONAL if importlib.util.find_spec(name.partition(".")[0]) is not None]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *there])
    known = {} if arguments.again else stored(arguments.results)
    end_s = time.monotonic() + 60 * arguments.minutes
    for name in arguments.loops or LOOPS:
        line = known.get(name)
        if line is not None and (line["plain"]["failure"] or len(line["governed"]) >= arguments.trainings):
            continue
        if NEEDS[name] and importlib.util.find_spec(NEEDS[name]) is None:
            continue
        if time.monotonic() > end_s:
            break
        line = measured(name, line, arguments.trainings)
        with arguments.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if line["plain"]["failure"]:
            tell(f"{name}: not trained plainly: {line['plain']['failure']}")


def outcome_in_short(cell: dict[str, Any]) -> str:
    """A training under a budget, for the terminal."""
    start = f"{cell['way']} {cell['share']:.0%}"
    if cell["failure"]:
        return f"{start} FAILED {cell['failure']}"
    differing = [*cell["differences"], *(f"afterwards {each}" for each in cell["differences_afterwards"])]
    bits = "same" if not differing else f"DIFFERS {differing}"
    held = "held" if outcome.is_within(cell) else f"{cell['peak_bytes'] / cell['budget_bytes']:.3f} of the budget"
    told = "" if outcome.is_within(cell) or outcome.is_told(cell) else " UNTOLD"
    counts = "/".join(str(cell["pooch"][f"steps_{kind}"]) for kind in ("on_plan", "online", "in_core"))
    return f"{start} {bits}, {held}{told}, {counts}, x{outcome.slowdown(cell):.2f}"


if __name__ == "__main__":
    sys.exit(main())
