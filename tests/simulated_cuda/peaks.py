"""Predicted and measured peaks of every built-in workload, small, on the simulated device in memory mode.

python -m tests.simulated_cuda [--expandable-segments] python -m tests.simulated_cuda.peaks [WORKLOAD ...]
`peaks_table.py` makes docs/simulated_peaks.md of what it prints.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch

from pooch.api.applying import apply  # imported here: frames that import keep what they hold
from pooch.api.planning import plan  # imported here: frames that import keep what they hold
from pooch.errors import InfeasibleBudget
from pooch.executor import RunStats
from pooch.ir import HookCosts, Link, Plan, Profile
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools import watch
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.memory_trace import earlier_objects_exempt
from pooch.workloads import Workload, built_in_workloads, load_workload
from pooch.workloads.settings import Setting

LINK = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)
STEPS = 3
SHARES = {"run": (1.0, 0.75, 0.55), "offload": (0.55,)}

# Batch sizes at which tensors are large beside the allocator's granularity. Kernels do nothing, so they cost no time.
BATCH_SIZES = {
    "resnet50@small": 128,
    "resnet101@small": 128,
    "resnet200@small": 128,
    "resnet@small": 128,
    "alexnet@small": 256,
    "googlenet@small": 128,
    "inception_v3@small": 128,
    "vit@small": 64,
    "gan@small": 512,
    "unet3d@small": 16,
    "unet3d@small-original": 16,
    "resnext101_3d@small": 16,
    "gpt2@small": 32,
    "llama@small": 64,
    "lstm@small": 4096,
    "lstm@small-fused": 512,
    "nmt@small": 4096,
    "char_rnn@small": 4096,
}
# Deep enough that its first layer alone is not the whole peak.
SETTINGS: dict[str, dict[str, Setting]] = {"resnext101_3d@small": {"blocks": "2-8-8-2", "inner_channels": 32}}
Mode = Literal["run", "offload"]


@dataclass(frozen=True)
class Peak:
    """The highest bytes of one step: whole blocks of the allocator, and what tensors asked for."""

    allocated_bytes: int
    requested_bytes: int


@dataclass(frozen=True)
class Trained:
    """A few steps under one plan, or plainly: peaks of those after the first, in which the optimizer makes its state.

    `highest`: of all of them; counters are those of all steps together.
    """

    peak: Peak
    highest: Peak
    swapped_in_bytes: int
    recomputed_ops: int
    late_swaps: int
    mismatches: int
    kept_after_errors: int


@dataclass(frozen=True)
class Row:
    """What was predicted of a training and what it took. `share` 0: plain training, whose peak a profile predicts."""

    workload: str
    mode: Mode
    share: float
    budget_bytes: int
    predicted_bytes: int
    planned_swaps: int
    trained: Trained

    @property
    def allocated_deviation(self) -> float:
        """How far the prediction is above the allocated bytes, as a share of these."""
        return self.predicted_bytes / self.trained.peak.allocated_bytes - 1

    @property
    def requested_deviation(self) -> float:
        """The same of the requested bytes."""
        return self.predicted_bytes / self.trained.peak.requested_bytes - 1


def profiled(workload: Workload, mode: Mode) -> Profile:
    """A profile in which no time means anything: none is looked for twice, and kernels are not timed, of which the
    simulated device tells torch's profiler nothing.
    """
    options = ProfileOptions(warmup=0, repeats=1, mode=mode)
    with ExitStack() as patches:
        patches.enter_context(mock.patch("pooch.profiler.profiler.device_slot_times_ms", return_value=None))
        patches.enter_context(mock.patch("pooch.profiler.profiler.are_worth_a_run", return_value=False))
        profile = profile_step(workload.forward, workload.model, workload.optimizer, LINK, options).profile
        return replace(profile, hooks=HookCosts(adds_in_place=watch.LIBRARY.get() is not None))


def planned(profile: Profile, share: float) -> Plan:
    """At that share of the in-core peak, or at the smallest budget that there is."""
    budget = int(profile.peak_bytes * share)
    try:
        return plan(profile, budget, region="step", time_limit_s=1.0, explain=False)
    except InfeasibleBudget as error:
        return plan(profile, error.minimum_bytes, region="step", time_limit_s=1.0, explain=False)


def train(workload: Workload, run: Any = None) -> Trained:
    """The user's loop."""
    peaks: list[Peak] = []
    stats: list[RunStats] = []
    for _ in range(STEPS):
        workload.model.zero_grad(set_to_none=True)
        with MemoryMeter(torch.device("cuda", 0)) as meter:
            _step(workload, run)
        peaks.append(Peak(meter.peak_bytes, meter.peak_bytes - meter.rounding_bytes))
        stats.append(replace(run.stats) if run is not None else RunStats())
        assert workload.optimizer is not None
        workload.optimizer.step()
    sums = {
        name: sum(getattr(step, name) for step in stats)
        for name in ("swapped_in_bytes", "recomputed_ops", "late_swaps", "mismatches", "kept_after_errors")
    }
    return Trained(_highest(peaks[1:]), _highest(peaks), **sums)


def _step(workload: Workload, run: Any) -> None:
    if run is None:
        workload.forward().backward()
        return
    with run.step():
        loss = workload.forward()
    loss.backward()


def _highest(peaks: list[Peak]) -> Peak:
    return Peak(max(peak.allocated_bytes for peak in peaks), max(peak.requested_bytes for peak in peaks))


@contextmanager
def _without_numbers(name: str) -> Iterator[None]:
    """Kernels do nothing in memory mode, so no program can ask what is in a tensor: here transformers would, whether
    several texts lie behind one another.
    """
    with ExitStack() as patches:
        if built_in_workloads()[name.partition("@")[0]].package == "transformers":
            asked = "transformers.masking_utils.find_packed_sequence_indices"
            patches.enter_context(mock.patch(asked, return_value=None))
        yield


@contextmanager
def fresh(name: str, batch_size: int | None = None) -> Iterator[Workload]:
    """The workload newly built, in a cache that is empty.

    Args:
        batch_size: None: that of `BATCH_SIZES`.
    """
    gc.collect()
    torch.cuda.empty_cache()
    with _without_numbers(name):
        items = batch_size or BATCH_SIZES[name]
        yield load_workload(name, batch_size=items, device="cuda", settings=SETTINGS.get(name))


def rows_of(name: str) -> list[Row]:
    """Plain training and training under plans, each on a workload of its own."""
    with fresh(name):
        pass  # what is imported for it is nobody's garbage: most of the time would go into looking through it
    gc.collect()
    with earlier_objects_exempt():
        return _rows_of(name)


def _rows_of(name: str) -> list[Row]:
    with fresh(name) as workload:
        profiles: dict[Mode, Profile] = {mode: profiled(workload, mode) for mode in ("run", "offload")}
        del workload
    with fresh(name) as workload:
        plain = train(workload)
        del workload
    rows = [Row(name, mode, 0, 0, profile.peak_bytes, 0, plain) for mode, profile in profiles.items()]
    return rows + [_planned_row(name, mode, profiles[mode], share) for mode in profiles for share in SHARES[mode]]


def _planned_row(name: str, mode: Mode, profile: Profile, share: float) -> Row:
    chosen = planned(profile, share)
    swaps = list(chosen.decisions.values()).count("swap")
    with fresh(name) as workload, apply(chosen, workload.model, verify="off") as run:
        trained = train(workload, run)
    return Row(name, mode, share, chosen.budget_bytes, chosen.predicted_peak_bytes, swaps, trained)


def main() -> None:
    """Rows as JSON, one a line."""
    for name in sys.argv[1:] or BATCH_SIZES:
        for row in rows_of(name):
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
