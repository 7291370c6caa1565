"""Whether plain training fits into the memory that the device has left; checked before any plain step is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..ir import Plan

if TYPE_CHECKING:
    import torch

    from ..workloads import Workload

Result = TypeVar("Result")


def fits_in_core(plan: Plan, workload: Workload) -> bool:
    """Whether the plain step of a plan's profile has room on the device beside what lives there now."""
    return has_room(plan.in_core_peak_bytes, workload)


def has_room(peak_bytes: int, workload: Workload) -> bool:
    """Whether a step with that peak has room on the device, beside what lives there now."""
    from ..ground.process_limits import is_limited
    from ..torchtools.device_memory import room_bytes
    from ..torchtools.malloc import return_large_blocks
    from ..torchtools.memory_trace import live_bytes
    from ..torchtools.training_state import model_device

    if is_limited():
        return_large_blocks()
    device = model_device(workload.model)
    return peak_bytes <= room_bytes(device, live_bytes(device))


def unless_out_of_memory(run: Callable[[], Result], device: torch.device) -> Result | None:
    """The result, or None if memory ran out; then everything that the attempt held is freed."""
    from ..torchtools.device_memory import give_memory_back
    from ..torchtools.out_of_memory import forgotten, is_out_of_memory

    try:
        return run()
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        forgotten(error)
    give_memory_back(device)
    return None
