"""A rank that is modelled, beside one that runs: FSDP2 over gloo, byte for byte as near as stated."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import pooch
from benchmarks.sharded_cases import CASES, Language, texts
from pooch.api.modelled_ranks import RanksOptions
from pooch.api.profiling import profile_workload
from pooch.devices import DeviceModel, LinkModel
from pooch.errors import PlanMismatch
from pooch.ir import Profile
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes
from pooch.workloads import Workload
from tests.executor.test_ranks import on_ranks

# Width, blocks and length: of the peaks beyond the state, buffers are 9% and 55%.
SIZES = ((64, 4, 64), (64, 4, 4))
PROCESSOR = DeviceModel("plain", "a processor", "cpu", 2**34, {"float32": 1.0}, 100.0, LinkModel("disk", 1.0, 1.0))


def modelled(width: int, blocks: int, length: int) -> Profile:
    def build() -> Workload:
        model, words = Language(width, blocks, length), texts(0, length)
        return Workload(model, lambda: model(words), torch.optim.AdamW(model.parameters()), "language")

    return profile_workload(build, device_model=PROCESSOR, ranks=RanksOptions(2, link_gb_per_s=1.0))


def _measured(width: int, blocks: int, length: int, rank: int) -> tuple[int, int]:
    """State, and the peak beyond it: the lowest of eight steps, since a thread of gloo's lets go of what it reduced
    sooner or later.
    """
    gc.collect()
    nothing_bytes = live_bytes(torch.device("cpu"))
    model, words = CASES["blocks"].model(width, blocks, length), texts(rank, length)
    optimizer = torch.optim.AdamW(model.parameters())
    model(words).backward()
    optimizer.step()
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        gc.collect()
        before_bytes = live_bytes(torch.device("cpu"))
        with MemoryMeter(torch.device("cpu")) as meter:
            model(words).backward()
        found.append((before_bytes - nothing_bytes, meter.peak_bytes - before_bytes))
    return min(found, key=lambda pair: pair[1])


def _measure(folder: Path, rank: int) -> None:
    (folder / f"{rank}.json").write_text(json.dumps([_measured(*sizes, rank) for sizes in SIZES]))


def test_the_bytes_of_a_modelled_rank_are_those_of_one_that_runs(tmp_path: Path) -> None:
    """Within 1% of the state, and 5% of what the step takes beyond it."""
    on_ranks(partial(_measure, tmp_path), tmp_path)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for sizes, *measured in zip(SIZES, *of_ranks, strict=True):
        profile = modelled(*sizes)
        assert profile.fault() is None
        for state_bytes, step_bytes in measured:
            assert profile.persistent_bytes == pytest.approx(state_bytes, rel=0.01)
            assert profile.peak_bytes - profile.persistent_bytes == pytest.approx(step_bytes, rel=0.05)


def test_a_plan_for_a_modelled_rank_says_so_and_is_never_applied(tmp_path: Path) -> None:
    profile = modelled(64, 2, 64)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    plan = pooch.plan(profile, "80%", effort="fast")
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert any("modelled and not run" in note and "cannot be applied" in note for note in plan.notes)
    model: nn.Module = Language(64, 2, 64)
    with pytest.raises(PlanMismatch, match=r"modelled ranks, so it cannot be applied: under torchrun, use pooch\.auto"):
        pooch.apply(plan, model)
