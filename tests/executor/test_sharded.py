"""Replays from the parameters that FSDP gathers: same bits, no collective more, and a lower peak than without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.sharded_cases import CASES, Case, collectives, texts
from pooch.analysis.dataflow import Dataflow
from pooch.ir import Plan, Profile
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import live_bytes
from tests.executor.support import all_of, applied, assert_same, planned_replays, quick_profile, region_of, tight_plan
from tests.executor.test_ranks import on_ranks

WIDTH, BLOCKS, LENGTH = 32, 3, 16
DEVICE = torch.device("cpu")


def gathered_values(profile: Profile) -> set[int]:
    return {value for unit in profile.gathered for value in unit.values}


def replays_that_read_gathered(plan: Plan, profile: Profile) -> int:
    gathered = gathered_values(profile)
    replayed = [action.target for action in plan.schedule.actions if action.kind == "replay"]
    return sum(not gathered.isdisjoint(profile.ops[op].reads) for op in replayed)


def trained(case: Case, rank: int, plan: Plan | None) -> tuple[dict[str, Tensor], Counter[str], int]:
    """Two steps of a model of its own: everything that must be equal, the collectives, and the peak of a third step
    beyond what lived before it.
    """
    model, found, counted = case.model(WIDTH, BLOCKS, LENGTH), dict[str, Tensor](), Counter[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with applied(plan, model) as run:
        for number in range(2):
            optimizer.zero_grad()
            words = texts(10 * number + rank, LENGTH)
            with collectives(counted):
                with region_of(run):
                    loss = model(words)
                loss.backward()
            found |= {f"{number} {n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found[f"{number} loss"] = loss.detach().clone()
            optimizer.step()
        optimizer.zero_grad()
        del loss
        before_bytes = live_bytes(DEVICE)
        with MemoryMeter(DEVICE) as meter:
            with region_of(run):
                loss = model(words)
            loss.backward()
        if run is not None and plan is not None:
            assert (run.stats.mismatches, run.stats.late_swaps) == (0, 0), run.stats
            assert run.stats.recomputed_ops == planned_replays(plan)
    found |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found, counted, meter.peak_bytes - before_bytes


def check(case: Case, rank: int) -> None:
    model = case.model(WIDTH, BLOCKS, LENGTH)
    words = texts(rank, LENGTH)
    profile = quick_profile(lambda: model(words), model)
    del model
    plan = tight_plan(profile, all_of(profile, "recompute"))
    assert replays_that_read_gathered(plan, profile) >= BLOCKS
    banned = replace(profile, gathered=())
    without = tight_plan(banned, all_of(banned, "recompute"))
    assert plan.predicted_peak_bytes < without.predicted_peak_bytes

    plain, expected, in_core_bytes = trained(case, rank, None)
    found, counted, peak_bytes = trained(case, rank, plan)
    assert_same(plain, found)
    assert counted == expected
    assert counted["all_gather"] > BLOCKS
    predicted_bytes = plan.predicted_peak_bytes - plan.persistent_bytes
    print(rank, case.name, peak_bytes, predicted_bytes, in_core_bytes, profile.peak_bytes - profile.persistent_bytes, without.predicted_peak_bytes - plan.persistent_bytes, counted, flush=True)
    assert peak_bytes <= predicted_bytes < in_core_bytes


def _check_all(rank: int) -> None:
    for case in CASES.values():
        print(rank, case.name, flush=True)
        check(case, rank)


def test_replays_of_sharded_layers(tmp_path: Path) -> None:
    on_ranks(_check_all, tmp_path)
