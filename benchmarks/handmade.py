"""Plans made by hand for small steps, so that a chosen mechanism fires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pooch.profiler.assembly
from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.api.manual import manual_plan
from pooch.ir import Decisions, Link, Plan, Profile, Region
from pooch.profiler import ProfileOptions, profile_step

LINK = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)


def tiny_profile(forward: Callable[[], torch.Tensor], model: torch.nn.Module, optimizer: Any = None) -> Profile:
    """A profile without measuring a link, from as few runs as possible; tiny activations are decided on too."""
    usual = pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES
    pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES = 1
    try:
        return profile_step(forward, model, optimizer, LINK, ProfileOptions(warmup=0, repeats=1, mode="run")).profile
    finally:
        pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES = usual


def tight_plan(profile: Profile, decisions: Decisions, region: Region = "step") -> Plan:
    """A plan under which everything leaves as early and returns as late as it can."""
    dataflow = Dataflow(profile, region)
    evaluation = StageEvaluator(dataflow).evaluate(decisions, 0)
    return manual_plan(dataflow, evaluation, decisions)
