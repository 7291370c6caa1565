"""Train every setup plainly and with Pooch, in child processes, and write the table of docs/setups.md.

    python -m benchmarks.setups [--setup NAME ...] [--again] [--plain-only] [--page-only]

Results are stored after each setup (benchmarks/results/setups.json), so a run that was ended goes on where it was;
`--again` measures again what is stored. A setup whose package is missing is reported and left out. Exit code 1 if any
differs from plain training or passes its budget.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.setups.counting import preloading
from benchmarks.setups.outcome import Outcome, budget_of, outcome_of, row_of
from benchmarks.setups.setup import Setup
from benchmarks.tables import LAYOUT, markdown_table, surroundings, tell, write_results
from pooch.ground.units import format_bytes
from pooch.ir.files import replace_file

NAME, PAGE = "setups", Path("docs/setups.md")
TITLE = "Training scripts with and without Pooch"
LIMIT_S = 900
PAGE_HEAD = """# Training scripts

Made by `python -m benchmarks.setups` from `benchmarks/results/setups.json`. Each line is a training script with random
weights and data, as people write them (`benchmarks/setups/`), run three times: plainly, with Pooch's lines under a
budget, and plainly once more in the process that had Pooch.

- **lines**: how many lines of the script are Pooch's, the import aside. Those with 0 are run by `pooch exec --budget`.
- **same bits**: losses, metrics, parameters, buffers, checkpoints and the random state at the end, compared with plain
  training, with deterministic algorithms and one thread.
- **peaks**: counted below PyTorch, in the C library, without Pooch (`benchmarks/setups/counting.cpp`), over the whole
  training, evaluation and the optimizer's steps included. The budget lies at 70% of the way from what stays in memory
  from step to step to the peak of plain training, unless a line says otherwise.
- **steps**: forward passes with gradients that ran under a plan / under the online evictor / without either.
  Between steps, the script waits a few times for a plan that is being made beside it: a training of so few steps
  would be over before. Steps while it is being made are the online ones.
- **time**: median step with Pooch over the median plain step of the same process, over the last half of the steps.
"""


def run_ranks(setup: Setup, budget_bytes: int | None = None) -> list[dict[str, Any]]:
    """What the processes of a setup wrote, by rank.

    Args:
        budget_bytes: None for plain training.

    Raises:
        RuntimeError: with the end of what a process wrote to stderr.
    """
    command = _command(setup, budget_bytes)
    common = preloading({**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(setup.ranks)})
    common |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(_free_port())}
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**common, **_number(setup, rank)})
        for rank in range(setup.ranks)
    ]
    found = []
    try:
        for process in ranks:
            told, complaints = process.communicate(timeout=LIMIT_S)
            done = [line for line in told.splitlines() if line.startswith('{"done"')]
            if not done:
                raise RuntimeError("\n".join(complaints.strip().splitlines()[-12:]) or f"exit {process.returncode}")
            found.append(json.loads(done[-1])["done"])
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {LIMIT_S} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


def _command(setup: Setup, budget_bytes: int | None) -> list[str]:
    child = ["-m", "benchmarks.setups.child", setup.name]
    if budget_bytes is None:
        return [sys.executable, *child]
    if setup.by_exec:
        return [sys.executable, "-m", "pooch", "exec", "--budget", str(budget_bytes), *child]
    return [sys.executable, *child, str(budget_bytes)]


def _number(setup: Setup, rank: int) -> dict[str, str]:
    """What tells a process its number, as `torchrun` does where there are several. All of them are on this machine."""
    return {"RANK": str(rank)} | ({"LOCAL_RANK": str(rank)} if setup.ranks > 1 else {})


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def measured(setup: Setup, plain: list[dict[str, Any]]) -> Outcome:
    """Train under a budget, after plain training."""
    budget_bytes = budget_of(setup, plain)
    tell(f"{setup.name}: under {format_bytes(budget_bytes)}")
    try:
        governed = run_ranks(setup, budget_bytes)
    except RuntimeError as error:
        return outcome_of(setup, budget_bytes, plain, None, str(error))
    return outcome_of(setup, budget_bytes, plain, governed)


def stored(folder: Path) -> dict[str, Any]:
    """Earlier outcomes by name, if they come from the same machine and versions."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    is_alike = document["surroundings"] == json.loads(json.dumps(surroundings())) and document["layout"] == LAYOUT
    return {outcome["setup"]: outcome for outcome in document["results"]} if is_alike else {}


def write(outcomes: Mapping[str, Any], order: list[str], folder: Path) -> None:
    """Results and table, in the order of the catalogue."""
    raw = [outcomes[name] for name in order if name in outcomes]
    write_results(NAME, TITLE, [row_of(outcome) for outcome in raw], raw, folder)


def page(folder: Path) -> str:
    """What docs/setups.md has to be where the stored results are these."""
    document = json.loads((folder / f"{NAME}.json").read_text())
    around = document["surroundings"]
    versions = ", ".join(f"{key} {value}" for key, value in around["software"].items())
    failed = [each for each in document["results"] if each["failure"]]
    failures = [f"- {each['setup']}: {each['failure'].splitlines()[-1]}" for each in failed]
    parts = [PAGE_HEAD, f"Measured on {around['name']}; {versions}.\n", markdown_table(document["rows"])]
    return "\n".join([*parts, *(["", "Not done:", "", *failures] if failures else [])]) + "\n"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="append", dest="names")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--plain-only", action="store_true", help="look at plain training, and write nothing")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if not arguments.page_only:
        _run(arguments)
    if arguments.plain_only:
        return 0
    replace_file(PAGE, page(arguments.output).encode())
    outcomes = json.loads((arguments.output / f"{NAME}.json").read_text())["results"]
    return int(not all(outcome["same_bits"] and outcome["is_within"] for outcome in outcomes))


def _run(arguments: argparse.Namespace) -> None:
    from benchmarks.setups.catalogue import SETUPS

    outcomes = stored(arguments.output)
    for name in arguments.names or list(SETUPS):
        setup = SETUPS[name]
        if setup.needs and importlib.util.find_spec(setup.needs) is None:
            tell(f"{name}: left out, the package {setup.needs} is missing")
            continue
        if name in outcomes and not arguments.again and not arguments.plain_only:
            continue
        tell(f"{name}: plainly")
        plain = run_ranks(setup)
        if arguments.plain_only:
            steps = plain[0]["trained"]["steps"]
            peak = max(step["peak_bytes"] for step in steps)
            tell(f"{len(steps)} steps, {steps[-1]['ms']:.0f} ms, {format_bytes(peak)}, budget "
                 f"{format_bytes(budget_of(setup, plain))}, lines {plain[0]['trained']['lines']}")  # fmt: skip
            continue
        outcomes[name] = measured(setup, plain).as_data()
        write(outcomes, list(SETUPS), arguments.output)
        tell(str(row_of(outcomes[name])))


if __name__ == "__main__":
    sys.exit(main())
