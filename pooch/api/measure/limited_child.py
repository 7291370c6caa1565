"""What the child process of `hard_limit` does."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import nullcontext

from ...ground.errors import first_line
from ...ground.units import format_bytes
from ...torchtools.malloc import return_large_blocks
from .arena_training import FIRST_STEPS, NO_ARENA
from .hard_limit import SLACK_BYTES, LimitedJob, limit_gpu


def trained(job: LimitedJob, report: Callable[[str, float], None]) -> tuple[str, str | None]:
    """Build the workload, run a step, set the limit, train.

    Returns:
        What ended the training, or "", and what the arena served, if one was asked for.
    """
    return_large_blocks()  # so that address space means live memory
    training = _Training(job)
    try:
        training.settle()
        slack_bytes = job.slack_bytes if job.slack_bytes is not None else SLACK_BYTES + training.reserved_beside_bytes()
        _set_limit(training, job.budget_bytes, slack_bytes)
        report("slack_bytes", slack_bytes)
        for _ in range(job.steps if training.arena is None else FIRST_STEPS - 1 + job.steps):
            report("loss", training.step())
            if training.arena is not None:
                training.arena.wait()
    except (RuntimeError, MemoryError) as error:
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return _cause(error), None
    if not job.on_arena:
        return "", None
    return "", NO_ARENA if training.arena is None else training.arena.stats.line()


def _cause(error: BaseException) -> str:
    """What ended the training, in one line."""
    from ...torchtools.out_of_memory import is_out_of_memory, missing_bytes

    if not is_out_of_memory(error):
        return f"{type(error).__name__}: {first_line(error)}"[:300]
    missing = missing_bytes(error)
    return "memory ran out" if missing is None else f"memory ran out where {format_bytes(missing)} were asked for"


class _Training:
    """The workload, under its plan if there is one."""

    def __init__(self, job: LimitedJob) -> None:
        from ...executor import apply_plan
        from ...torchtools.training_state import model_device
        from ..arenas import arena_for

        self.workload = job.factory()
        self.device = model_device(self.workload.model)
        self.run = self.arena = None
        if job.plan is not None:
            self.arena = arena_for(self.workload.model) if job.on_arena else None
            self.run = apply_plan(job.plan, self.workload.model, measure_every=None, memory=self.arena)
        self._in_core_peak_bytes = job.in_core_peak_bytes

    def settle(self) -> None:
        """Run one step before the limit is set: threads start, code is generated, optimizer state is created.

        If the plain step may not fit, its saved tensors leave the device.
        """
        from ...profiler.pressure import saved_tensors_away

        is_safe = self.run is not None or self._plain_step_fits()
        with nullcontext() if is_safe else saved_tensors_away(self.device):
            self.step()

    def _plain_step_fits(self) -> bool:
        from ...ground.process_limits import is_limited
        from ..in_core import has_room

        known_bytes = self._in_core_peak_bytes
        return known_bytes is not None and not is_limited() and has_room(known_bytes, self.workload)

    def reserved_beside_bytes(self) -> int:
        """What a caching allocator reserves beyond the bytes of tensors in a step that begins with an empty cache.

        The steps under the limit begin so too. 0 on a CPU, which has no such allocator.
        """
        from ...torchtools.accelerators import has_streams
        from ...torchtools.device_memory import give_memory_back
        from ...torchtools.memory_meter import MemoryMeter

        if not has_streams(self.device):
            return 0
        self.workload.model.zero_grad(set_to_none=True)
        give_memory_back(self.device)
        with MemoryMeter(self.device) as meter:
            self.settle()
        return max(0, (meter.reserved_bytes or 0) - meter.peak_bytes)

    def step(self) -> float:
        """Run one step with the optimizer's and return the loss."""
        from .training import forward_and_backward

        self.workload.model.zero_grad(set_to_none=True)
        loss = float(forward_and_backward(self.workload, self.run))
        if self.workload.optimizer is not None:
            self.workload.optimizer.step()
        return loss


def _set_limit(training: _Training, budget_bytes: int, slack_bytes: int) -> None:
    """Limit this process to the budget: its address space on the CPU."""
    from ...torchtools.accelerators import has_streams
    from ...torchtools.memory_trace import live_bytes

    training.workload.model.zero_grad(set_to_none=True)
    if has_streams(training.device):
        limit_gpu(training.device, budget_bytes, slack_bytes)
        return
    room = budget_bytes - live_bytes(training.device) + slack_bytes
    limit = _address_space_bytes() + max(0, room)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))


def _address_space_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().vms)
