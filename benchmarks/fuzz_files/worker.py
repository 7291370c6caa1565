"""Judges a row of cases and tells what became of each, a line of JSON at a time: the parent sees where it ends."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.fuzz_files.judging import Defect, outcome_of, warm_up
from benchmarks.fuzz_files.kinds import kind_of


def main() -> None:
    name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries may print
    torch.set_num_threads(1)
    kind = kind_of(name)
    warm_up(kind)
    for seed in range(first, last):
        try:
            told = {"seed": seed, "outcome": outcome_of(kind, seed)}
        except Defect as defect:
            told = {"seed": seed, "defect": str(defect)}
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
