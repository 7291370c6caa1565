"""A rank that is modelled, next to one that runs: the same bytes, with FSDP2 over gloo."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import torch

from benchmarks.sharded_cases import CASES, Language, texts
from pooch.api.modelled_ranks import RanksOptions
from pooch.api.profiling import profile_workload
from pooch.devices import DeviceModel, LinkModel
from pooch.ir import Profile
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes
from pooch.workloads import Workload
from tests.executor.test_ranks import on_ranks

import os
WIDTH, BLOCKS, LENGTH = (int(os.environ.get(n,d)) for n,d in (("W",64),("NB",4),("L",64)))
CPU = DeviceModel("plain", "a plain processor", "cpu", 2**34, {"float32": 1.0}, 100.0, LinkModel("disk", 1.0, 1.0))


def modelled() -> Profile:
    def build() -> Workload:
        model, words = Language(WIDTH, BLOCKS, LENGTH), texts(0, LENGTH)
        return Workload(model, lambda: model(words), torch.optim.AdamW(model.parameters()), "language")

    return profile_workload(build, device_model=CPU, ranks=RanksOptions(2, link_gb_per_s=1.0))


def _measure(folder: Path, rank: int) -> None:
    before_model_bytes = live_bytes(torch.device("cpu"))
    model, words = CASES["blocks"].model(WIDTH, BLOCKS, LENGTH), texts(rank, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        gc.collect()
        before = live_bytes(torch.device("cpu"))
        with MemoryMeter(torch.device("cpu")) as meter:
            model(words).backward()
        found.append((before - before_model_bytes, meter.peak_bytes - before))
        optimizer.step()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_the_peak_of_a_modelled_rank_is_that_of_one_that_runs(tmp_path: Path) -> None:
    profile = modelled()
    on_ranks(partial(_measure, tmp_path), tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        print(found, profile.persistent_bytes, profile.peak_bytes - profile.persistent_bytes, profile.ranks)
    raise SystemExit(1)
