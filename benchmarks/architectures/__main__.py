"""Train every network of a catalogue of others' plainly and under budgets, and write the page docs/architectures.md.

    python -m benchmarks.architectures [--package NAME ...] [--network NAME ...] [--first N] [--budgets N]
                                       [--minutes M] [--again] [--page-only]

Each training runs in a process of its own with a time limit. What came of a network is one line of
benchmarks/results/architectures-cpu.jsonl, written when its last training has ended, so a run goes on where an earlier
one stopped. A package that is missing is left out. How to install them is told in docs/architectures.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.apart import in_a_process, stored
from benchmarks.architectures import outcome
from benchmarks.architectures.catalogue import PACKAGES, is_there, names_of
from benchmarks.architectures.child import run
from benchmarks.architectures.page import page
from benchmarks.setups.counting import preloading
from benchmarks.tables import tell

RESULTS = Path("benchmarks/results/architectures-cpu.jsonl")
PAGE = Path("docs/architectures.md")
FOUND = Path(__file__).with_name("found.md")  # told by hand
LIMIT_S = 150
SHARES = (0.75, 0.5)
WAYS = ("auto", "exec")
PRELOADED = ("torch", "numpy", "pooch.autopilot.finding", "benchmarks.architectures.child")
# TorchScript takes other formulas, with other bits, once it has seen some calls in a process.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTORCH_JIT": "0"}
OPTIONAL = ("transformers.modeling_utils", "monai.networks.nets")


def trainings_of(name: str) -> list[tuple[str, float]]:
    """How a network is trained: at each share of its plain peak once, ways and order by turns over all networks."""
    turn = zlib.crc32(name.encode())
    found = [(WAYS[(turn + number) % 2], share) for number, share in enumerate(SHARES)]
    return found if turn & 2 else found[::-1]


def answer_to(job: dict[str, Any]) -> dict[str, Any]:
    """What a training in a process of its own answers, or why there is no answer."""
    return in_a_process(run, job, LIMIT_S)


def measured(name: str, known: dict[str, Any] | None, budgets: int) -> dict[str, Any]:
    """Train a network plainly and under budgets.

    Args:
        name: of the network.
        known: its line so far, if there is one.
        budgets: how many of them.
    """
    governed = [] if known is None else known["governed"]
    plain = answer_to({"name": name, "way": "plain", "size": None, "budget_bytes": None})
    line: dict[str, Any] = {"name": name, "plain": outcome.plain_cell(plain), "governed": governed}
    if "failure" in plain:
        return line
    for way, share in trainings_of(name)[len(governed) : budgets]:
        budget_bytes = int(share * outcome.peak_bytes(plain))
        job = {"name": name, "way": way, "size": plain["size"], "budget_bytes": budget_bytes}
        cell = outcome.governed_cell(way, share, budget_bytes, plain, answer_to(job))
        if cell.get("differences") and not repeats(name, plain):
            cell["failure"] = "plain training does not repeat its own numbers"
        line["governed"].append(cell)
    return line


def repeats(name: str, plain: dict[str, Any]) -> bool:
    """Whether plain training in another process has the same numbers."""
    again = answer_to({"name": name, "way": "plain", "size": plain["size"], "budget_bytes": None})
    return not again.get("failure") and not outcome.differences(plain, again)


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", dest="packages", choices=PACKAGES)
    parser.add_argument("--network", action="append", dest="networks")
    parser.add_argument("--first", type=int, help="only so many networks of each package")
    parser.add_argument("--budgets", type=int, default=len(SHARES), help="one, for a first look at more networks")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no network later than this")
    parser.add_argument("--again", action="store_true", help="measure again what is stored")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.page_only:
        sweep(arguments)
    PAGE.write_text(page(list(stored(arguments.results).values()), FOUND.read_text()))
    return 0


def sweep(arguments: argparse.Namespace) -> None:
    """Measure what is not stored yet."""
    os.environ.update(preloading(dict(os.environ)) | ENVIRONMENT)
    optional = [name for name in OPTIONAL if is_there(name.partition(".")[0])]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *optional])
    packages = [package for package in arguments.packages or PACKAGES if is_there(package)]
    names = arguments.networks or in_turns([names_of(package)[: arguments.first] for package in packages])
    known = {} if arguments.again else stored(arguments.results)
    end_s = time.monotonic() + 60 * arguments.minutes
    for name in names:
        line = known.get(name)
        if line is not None and (line["plain"]["failure"] or len(line["governed"]) >= arguments.budgets):
            continue
        if time.monotonic() > end_s:
            break
        line = measured(name, line, arguments.budgets)
        with arguments.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        tell(f"{name}: {in_short(line)}")


def in_turns(lists: Sequence[Sequence[str]]) -> list[str]:
    """The entries of lists by turns, so that a part of the sweep is a sample of all packages."""
    rows = itertools.zip_longest(*lists)
    return [name for row in rows for name in row if name is not None]


def in_short(line: dict[str, Any]) -> str:
    """A line for the terminal."""
    if line["plain"]["failure"]:
        return f"not trained plainly: {line['plain']['failure']}"
    return "; ".join(_cell_in_short(cell) for cell in line["governed"])


def _cell_in_short(cell: dict[str, Any]) -> str:
    start = f"{cell['way']} {cell['share']:.0%}"
    if cell["failure"]:
        return f"{start} FAILED {cell['failure']}"
    bits = "same" if outcome.is_same(cell) else f"DIFFERS {cell['differences']}"
    held = "held" if outcome.is_within(cell) else f"{cell['peak_bytes'] / cell['budget_bytes']:.3f} of the budget"
    told = "" if outcome.is_within(cell) == (not outcome.is_told(cell)) else " UNTOLD"
    counts = "/".join(str(cell["pooch"][f"steps_{kind}"]) for kind in ("on_plan", "online", "in_core"))
    return f"{start} {bits}, {held}{told}, {counts}, x{outcome.slowdown(cell):.2f}"


if __name__ == "__main__":
    sys.exit(main())
