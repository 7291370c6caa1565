"""A budget from what is free now: what the process has there and could still allocate, less a margin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ground.units import format_bytes
from .device_memory import free_bytes

# For what allocators lose to rounding and holes, what libraries take, and what others take between two looks.
_MARGIN_SHARE = 1 / 16
_LEAST_MARGIN_BYTES, _MOST_MARGIN_BYTES = 64 * 2**20, 2**30


@dataclass(frozen=True, slots=True)
class FreeBudget:
    """What the tensors of this process may take.

    Attributes:
        size_bytes: The budget.
        margin_bytes: What is left alone.
    """

    size_bytes: int
    margin_bytes: int

    def told(self, what: str) -> str:
        """The words for it, given those for what it is taken from."""
        return f"{format_bytes(self.size_bytes)}: {what}, less a margin of {format_bytes(self.margin_bytes)}"


def free_budget(device: torch.device, live_bytes: int) -> FreeBudget:
    """Returns the budget that what is free now allows.

    Args:
        device: a CPU, or a device with streams.
        live_bytes: what the process's tensors take there now.
    """
    return less_a_margin(live_bytes + free_bytes(device))


def less_a_margin(room_bytes: int) -> FreeBudget:
    """Returns the budget that leaves a sixteenth of some room alone, at least 64 MiB and at most 1 GiB."""
    margin_bytes = min(_MOST_MARGIN_BYTES, max(_LEAST_MARGIN_BYTES, int(_MARGIN_SHARE * room_bytes)))
    margin_bytes = min(margin_bytes, room_bytes // 2)  # of next to nothing at least half may be used
    return FreeBudget(max(1, room_bytes - margin_bytes), margin_bytes)
