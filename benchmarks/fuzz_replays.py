"""Random small models, trained plainly, under random plans and under `pooch.auto`, and compared bit by bit.

    python -m benchmarks.fuzz_replays --models 10000 [--first-seed 0] [--jobs 2] [--output benchmarks/results]
    python -m benchmarks.fuzz_replays --seed N [--shrink]

Each model is written from a seed, out of ordinary pieces and hostile ones (those of `tests/hostile`). A run keeps what
it has found in `fuzz-replays.jsonl` beside its results, and continues there when it is started again; `--fresh` begins
anew. Models whose plain training raises, or does not repeat itself, are counted and discarded. `--seed` describes one
model and what became of it; `--shrink` takes away pieces as long as it fails. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.fuzz.recipe import written
from benchmarks.fuzz.report import counts, page
from benchmarks.fuzz.shrink import shrunk
from benchmarks.fuzz.verdict import verdict_of
from benchmarks.fuzz.workers import Journal, judge_all
from pooch.ir.files import replace_file
from tests.hostile.governors import frozen_heap


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=1000, help="number of models")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has found")
    parser.add_argument("--seed", type=int, help="describe and judge this model alone")
    parser.add_argument("--shrink", action="store_true", help="with --seed: look for a smaller model that fails")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return judge_one(arguments.seed, shrink=arguments.shrink)
    return judge_many(arguments)


def judge_one(seed: int, *, shrink: bool) -> int:
    """Describe one model and what became of it."""
    torch.set_num_threads(1)
    recipe = written(seed)
    print(recipe)
    with frozen_heap():
        found = verdict_of(recipe)
        if shrink and found.failures:
            recipe, found = shrunk(recipe)
            print("smallest that fails:", recipe, sep="\n")
    print(found.discarded or "\n".join(f"{way}: {outcome}" for way, outcome in found.outcomes.items()))
    return int(bool(found.failures))


def judge_many(arguments: argparse.Namespace) -> int:
    """Judge a row of seeds, and write what was found."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "fuzz-replays.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    journal = Journal(path)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.models)
    earlier, start = sum(seed in journal.verdicts for seed in seeds), time.monotonic()

    def tell(journal: Journal) -> None:
        judged = [journal.verdicts[seed] for seed in seeds if seed in journal.verdicts]
        done, failing = len(judged), sum(bool(each.failures) for each in judged)
        rate = (done - earlier) / (time.monotonic() - start)
        print(f"{done} of {len(seeds)} models, {rate:.1f} per second, {failing} failing", flush=True)

    judge_all(seeds, arguments.jobs, journal, tell)
    found = counts((each for seed, each in journal.verdicts.items() if seed in seeds), journal.memory)
    replace_file(arguments.output / "fuzz-replays.json", json.dumps(found, indent=1).encode())
    text = page(found)
    replace_file(arguments.output / "fuzz-replays.md", text.encode())
    print(text)
    return int(found["failing_models"] > 0)


if __name__ == "__main__":
    sys.exit(main())
