"""The process that judges a row of seeds: a line of JSON for each, after one that says which seed begins."""

from __future__ import annotations

import json
import sys

import psutil
import torch

from benchmarks.fuzz.verdict import verdict
from tests.hostile.governors import frozen_heap

MODELS_PER_LOOK = 100  # at the memory of the process


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    process = psutil.Process()
    with frozen_heap():
        for judged, seed in enumerate(seeds, 1):
            print(json.dumps({"begins": seed}), flush=True)
            told = verdict(seed).as_json()
            print(json.dumps(told), flush=True)
            if judged % MODELS_PER_LOOK == 0:
                looked = {"first": seeds[0], "models": judged, "memory_bytes": process.memory_info().rss}
                print(json.dumps(looked), flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
