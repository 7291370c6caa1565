"""What the hooks cost the host: a chain of tiny ops, where nothing but the host's time counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import pooch.profiler.assembly
from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.repeatable import on_device
from pooch.api.manual import plan_from_decisions
from pooch.executor import Run, apply_plan
from pooch.ir import Choice, Link, Plan, Profile
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools.accelerators import synchronize

OPS, SMALL_OPS = 400, 40
ROUNDS, SMALL_ROUNDS = 15, 3
LINK = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)


class Chain(nn.Module):
    """`x -> tanh(x) -> tanh -> ...`: one op and one saved tensor each."""

    def __init__(self, ops: int, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, device=device))
        self._ops = ops

    def forward(self) -> torch.Tensor:
        hidden = self.scale * 1
        for _ in range(self._ops):
            hidden = torch.tanh(hidden)
        return hidden


def run(job: Job) -> Verdict:
    """Host time of one step, plainly, with a plan that keeps all, and with hooks and mode at work."""
    pooch.profiler.assembly.SMALLEST_ACTIVATION_BYTES = 1  # tiny values are decided on, or nothing would be
    device, ops = on_device(job.device), SMALL_OPS if job.small else OPS
    rounds = SMALL_ROUNDS if job.small else ROUNDS
    model = Chain(ops, device)

    def forward() -> torch.Tensor:
        return model().sum()

    profile = profile_step(forward, model, None, LINK, ProfileOptions(warmup=1, repeats=1, mode="run")).profile
    middle = profile.activations[len(profile.activations) // 2].id
    plans = {
        "kept, nothing installed": _plan(profile, {}),
        "hooks and mode, one value recomputed": _plan(profile, {middle: "recompute"}),
        "hooks and mode, one value swapped": _plan(profile, {middle: "swap"}),
    }
    plain_us = _step_us(forward, None, device, rounds)
    job.add("hooks", {"step": "plain", "host time": f"{plain_us / 1000:.2f} ms", "above plain, each op": ""})
    for name, plan in plans.items():
        with apply_plan(plan, model, measure_every=None) as run:
            took_us = _step_us(forward, run, device, rounds)
        each_us = (took_us - plain_us) / ops
        job.add(
            "hooks",
            {"step": name, "host time": f"{took_us / 1000:.2f} ms", "above plain, each op": f"{each_us:.2f} us"},
        )
    job.add("notes", f"{ops} forward ops of one tiny tensor, forward and backward, medians of {rounds}")
    return Verdict("passed")


def _plan(profile: Profile, decisions: dict[int, Choice]) -> Plan:
    return plan_from_decisions(profile, decisions, region="step")


def _step_us(forward: Callable[[], torch.Tensor], run: Run | None, device: torch.device, rounds: int) -> float:
    samples = []
    for _ in range(rounds + 2):
        region: Any = run.step() if run is not None else nullcontext()
        synchronize(device)
        start = time.perf_counter()
        with region:
            loss = forward()
        loss.backward()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples[2:])
