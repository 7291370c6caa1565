"""The swap tier of a machine, shared by the ranks on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..api.budgets import parse_budget
from ..executor.engines.pinned import RESERVE_BYTES
from ..ground.errors import UsageError
from ..ground.units import format_bytes
from ..torchtools.accelerators import has_streams
from ..torchtools.device_memory import free_bytes

_PAGE_BYTES = 4096  # rooms in a tier begin at multiples of this


@dataclass(frozen=True, slots=True)
class TierShare:
    """What the ranks of one machine may take of its swap tier.

    Attributes:
        node_bytes: All of them together. None: no limit.
        ranks: Number of ranks on this machine.
        asked_bytes: What was asked for, if the machine has less than that.
    """

    node_bytes: int | None
    ranks: int
    asked_bytes: int | None = None

    @property
    def each_bytes(self) -> int | None:
        """What one rank may take. None: no limit."""
        return None if self.node_bytes is None else self.node_bytes // self.ranks // _PAGE_BYTES * _PAGE_BYTES

    def __str__(self) -> str:
        if self.node_bytes is None or self.each_bytes is None:
            return "the swap tier has no limit"
        text = f"the swap tier may take {format_bytes(self.node_bytes)} of this machine"
        if self.asked_bytes is not None:
            text += f", which has no more left (the host budget is {format_bytes(self.asked_bytes)})"
        return text + (f": {format_bytes(self.each_bytes)} for each of {self.ranks} ranks" if self.ranks > 1 else "")


def tier_budget(device: torch.device, host_budget: float | str | None, disk_budget: float | str | None) -> int | None:
    """Return what the swap tier of this machine may take for a device, given what a user has set. None: no limit.

    Raises:
        UsageError: One of them does not parse, both are set, or a budget of the disk for a tier that is host memory.
    """
    if disk_budget is None:
        return None if host_budget is None else parse_budget(host_budget, None, name="host budget")
    if has_streams(device):
        raise UsageError(f"the swap tier of {device.type} is host memory and not on disk: give a host budget instead")
    if host_budget is not None:
        raise UsageError("the swap tier of a CPU is on disk: give a disk budget or a host budget, not both")
    return parse_budget(disk_budget, None, name="disk budget")


def tier_share(host_bytes: int | None, device: torch.device, ranks: int) -> TierShare:
    """Share the swap tier of this machine among its ranks.

    Where the tier is host memory, it is no larger than what the machine, the control group and `ulimit` have left, less
    what blocks of it leave to the system. A
    single process without a host budget finds out by itself, since nobody else takes from it.

    Args:
        host_bytes: The host budget of the machine, or None.
        device: The device that is swapped from.
        ranks: Number of ranks on this machine.
    """
    if not has_streams(device) or (host_bytes is None and ranks == 1):
        return TierShare(host_bytes, ranks)
    left_bytes = max(0, free_bytes(torch.device("cpu")) - RESERVE_BYTES)
    if host_bytes is not None and host_bytes <= left_bytes:
        return TierShare(host_bytes, ranks)
    return TierShare(left_bytes, ranks, host_bytes)
