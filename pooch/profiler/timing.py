"""How long each slot's op takes, and how long the unprofiled step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pooch.profiler.assembly import StepAssembly
from pooch.profiler.step import check_loss
from pooch.torchtools.accelerators import synchronize


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Duration of one step's passes, in ms.

    Attributes:
        forward_ms, backward_ms: until the device is done.
        forward_host_ms, backward_host_ms: until the host has issued all of it; the same on a CPU.
    """

    forward_ms: float
    backward_ms: float
    forward_host_ms: float = 0.0
    backward_host_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """Both passes."""
        return self.forward_ms + self.backward_ms


def time_step(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Time one step, forward and backward, without recording anything; gradients are dropped before it.

    Args:
        forward: () -> loss tensor.
        model: whose gradients are dropped.
        device: waited for before each reading of the clock.
        between: called after the forward pass.
    """
    model.zero_grad(set_to_none=True)
    synchronize(device)
    begin_s = time.perf_counter()
    loss = check_loss(forward())
    issued_s = time.perf_counter()
    synchronize(device)
    middle_s = time.perf_counter()
    between()
    loss.backward()
    all_issued_s = time.perf_counter()
    synchronize(device)
    end_s = time.perf_counter()
    spans_s = (middle_s - begin_s, end_s - middle_s, issued_s - begin_s, all_issued_s - middle_s)
    return StepTimes(*(span_s * 1000 for span_s in spans_s))


def typical(samples: Sequence[StepTimes]) -> StepTimes:
    """The median of three or more steps; of fewer, the fastest, since disturbances only make a step slower."""
    ordered = sorted(samples, key=_step_ms_of)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) > 2 else ordered[0]


def _step_ms_of(times: StepTimes) -> float:
    return times.step_ms


def slot_times_ms(assembly: StepAssembly) -> list[float]:
    """Measured duration of each slot's op in one recorded step (CPU clocks), in ms; the closing slot takes none."""
    forward = [op.time_ms for op in assembly.recorder.ops]
    backward = [(span.end_ns - span.start_ns) / 1e6 for span in assembly.spans[assembly.forward_ops : -1]]
    return [*forward, *backward, 0.0]


def shortest_ms(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """The shorter time of each slot; the first run's where the second one has other slots."""
    if len(first) != len(second):
        return list(first)
    return [min(pair) for pair in zip(first, second, strict=True)]
