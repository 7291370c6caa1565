"""Timing plain and planned steps beside one another."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ground.progress import Progress
from ...ir import Plan
from ..in_core import fits_in_core, unless_out_of_memory
from .training import applied, forward_and_backward

if TYPE_CHECKING:
    from ...executor import Run
    from ...executor.verification import Verify
    from ...workloads import Workload


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of plain and planned steps that took turns, so that both ran under the same conditions.

    Attributes:
        plain_samples_ms: in the order in which they ran; empty if plain steps do not fit in-core.
        planned_samples_ms: in the order in which they ran.
    """

    plain_samples_ms: tuple[float, ...]
    planned_samples_ms: tuple[float, ...]

    @property
    def plain_ms(self) -> float | None:
        """Median of the plain steps."""
        return statistics.median(self.plain_samples_ms) if self.plain_samples_ms else None

    @property
    def planned_ms(self) -> float:
        """Median of the planned steps."""
        return statistics.median(self.planned_samples_ms)


def time_in_turns(workload: Workload, plan: Plan, steps: int, progress: Progress, verify: Verify = "first") -> Timing:
    """Time plain and planned steps in turns on one model, without measuring anything else.

    Which of the two runs first alternates, so that a machine that becomes faster or slower, and what a step leaves
    behind in the allocator, affect both alike. Plain steps that do not fit in-core are left out.
    """
    from ...torchtools.training_state import model_device

    with applied(plan, workload, verify) as run:
        assert run is not None
        if fits_in_core(plan, workload):
            device = model_device(workload.model)
            timing = unless_out_of_memory(lambda: time_under(workload, run, steps, progress), device)
            if timing is not None:
                return timing
        return time_under(workload, run, steps, progress, beside_plain=False)


def time_under(workload: Workload, run: Run, steps: int, progress: Progress, *, beside_plain: bool = True) -> Timing:
    """`time_in_turns` under a plan that is already applied; without `beside_plain`, planned steps only."""
    plain: list[float] = []
    planned: list[float] = []
    first = warmup_steps(run)
    for number in range(first + steps):
        if number >= first:
            progress(f"timing {'' if beside_plain else 'planned '}step {number - first + 1} of {steps}")
        elif beside_plain:
            progress("warming up")
        for is_planned in (number % 2 == 1, number % 2 == 0):
            if is_planned:
                planned.append(timed_step(workload, run))
            elif beside_plain:
                with run.paused():
                    plain.append(timed_step(workload, None))
    return Timing(tuple(plain[first:]), tuple(planned[first:]))


def warmup_steps(run: Run) -> int:
    """Number of steps under a plan before it runs as it will: in the first ones, replays are compared in full."""
    from ...executor.verification import PROOFS

    return PROOFS if run.does_replay else 1


def timed_step(workload: Workload, run: Run | None) -> float:
    """Time the forward and backward pass of one step in ms, with gradients set to None before it."""
    from ...torchtools.accelerators import synchronize
    from ...torchtools.training_state import model_device

    device = model_device(workload.model)
    workload.model.zero_grad(set_to_none=True)
    synchronize(device)
    start = time.perf_counter()
    forward_and_backward(workload, run)
    synchronize(device)
    return (time.perf_counter() - start) * 1000
