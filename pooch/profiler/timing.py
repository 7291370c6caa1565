"""Durations of each slot's op and of the unprofiled step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..torchtools.accelerators import synchronize
from .slots import StepAssembly
from .step import Forward, check_loss


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Duration of one step's passes, in ms, until the device is done, and until the host has issued all of it.

    On a CPU, both are the same.
    """

    forward_ms: float
    backward_ms: float
    forward_host_ms: float = 0.0
    backward_host_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """Duration of both passes, in ms."""
        return self.forward_ms + self.backward_ms


def time_step(
    forward: Forward,
    model: torch.nn.Module,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Times one step, forward and backward, without recording anything.

    Gradients are dropped first. `between` is called after the forward pass.
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
    """Returns the median of three or more steps; of fewer, the fastest, since disturbances only make a step slower."""
    ordered = sorted(samples, key=lambda times: times.step_ms)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) > 2 else ordered[0]


def slot_times_ms(assembly: StepAssembly) -> list[float]:
    """Returns the duration of each slot's op in one recorded step in ms (CPU clock); the closing slot takes none."""
    forward = [op.time_ms for op in assembly.recorder.ops]
    backward = [(span.end_ns - span.start_ns) / 1e6 for span in assembly.spans[assembly.forward_ops : -1]]
    return [*forward, *backward, 0.0]
