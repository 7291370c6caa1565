"""How long each slot's op takes, and how long the unprofiled step takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from pooch.profiler.assembly import StepAssembly
from pooch.profiler.step import check_loss
from pooch.torchtools.training_state import synchronize


def time_step(forward: Callable[[], torch.Tensor], model: torch.nn.Module, device: torch.device) -> float:
    """One plain step, forward and backward, in ms; gradients are dropped before it."""
    model.zero_grad(set_to_none=True)
    synchronize(device)
    start = time.perf_counter()
    loss = check_loss(forward())
    loss.backward()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def slot_times_ms(assembly: StepAssembly) -> list[float]:
    """Measured duration of each slot's op in one recorded step (CPU clocks), in ms; the closing slot takes none."""
    forward = [op.time_ms for op in assembly.recorder.ops]
    backward = [(span.end_ns - span.start_ns) / 1e6 for span in assembly.spans[assembly.forward_ops : -1]]
    return [*forward, *backward, 0.0]


def median_times_ms(runs: Sequence[Sequence[float]]) -> list[float]:
    """Median over the runs that have as many slots as the first one."""
    same = [run for run in runs if len(run) == len(runs[0])]
    return [statistics.median(samples) for samples in zip(*same, strict=True)]
