"""A step without a plan takes the bytes that it is predicted to: the same machine runs both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pooch.api.hooked import dataflow_of
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.ir import Profile
from pooch.machine import EvictionPolicy
from pooch.machine.eviction import Rule
from pooch.simulator import run_online
from tests.executor.online.support import holding, without_collector
from tests.executor.support import quick_profile

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]


class CopyOnly(Rule):
    """What is replayed depends on times, which are never the same twice."""

    policy = EvictionPolicy(may_drop=False)


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16**3, 10)), torch.randn(4, 3, 32, 32)


def executed(model: nn.Module, inputs: torch.Tensor, profile: Profile, budget_bytes: int) -> tuple[int, int]:
    """By how many bytes a step passes the budget, and its peak, both as the profile counts."""
    model.zero_grad()
    with without_collector(), holding() as evictor:
        evictor.policy = CopyOnly.policy
        other_bytes = evictor.live.now() - profile.ops[0].entry_bytes
        evictor.set_budget(budget_bytes + other_bytes)
        evictor.begin_step(RunStats())
        step = Step(evictor)
        with following(step):
            loss = model(inputs).square().mean()
        loss.backward()
        found = evictor.missing_bytes, evictor.live.peak() - other_bytes
        del step, loss
        evictor.set_budget(2**60)
    return found


def test_the_bytes_over_the_budget_are_those_that_were_predicted() -> None:
    model, inputs = network()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    dataflow = dataflow_of(profile, "step", hooked=True)
    over = set()
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.4):
        budget_bytes = int(share * profile.peak_bytes)
        predicted = run_online(dataflow, budget_bytes, None, lambda dataflow, now_ms: CopyOnly())
        over_bytes, peak_bytes = executed(model, inputs, profile, budget_bytes)
        assert over_bytes == predicted.over_bytes
        if over_bytes or share == 1.0:
            assert peak_bytes == predicted.peak_bytes
        over.add(over_bytes > 0)
    assert over == {False, True}
