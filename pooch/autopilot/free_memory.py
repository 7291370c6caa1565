"""A budget that is what is free: looked at as steps begin, since others come and go on the same device."""

from __future__ import annotations

import torch

from ..machine.account import LiveBytes
from ..torchtools.free_budget import FreeBudget, free_budget
from .remarks import Remarks

# Shares of the margin by which what is free may change before the budget does: a margin is there to be used.
_LESS, _MORE = 0.25, 0.5
_QUIET_STEPS = 16  # between two looks, while steps are far away from the budget


class FreeMemory:
    """What is free on a device, with what this process has there.

    Args:
        device: The device.
        live: Counts what this process has.
        remarks: Tells of changes.

    Attributes:
        held: The budget that it allows.
    """

    def __init__(self, device: torch.device, live: LiveBytes, remarks: Remarks) -> None:
        self._device, self._live, self._remarks = device, live, remarks
        self._unseen_steps = 0
        self.held = free_budget(device, live.now())
        remarks.free_memory(self.held.size_bytes, self.held.told("what is free now"))

    def look(self, *, is_quiet: bool) -> FreeBudget | None:
        """Return what the budget is from now on, or None if nothing has changed that matters.

        Args:
            is_quiet: Whether a look now and then is enough.
        """
        self._unseen_steps += 1
        if is_quiet and self._unseen_steps < _QUIET_STEPS:
            return None
        self._unseen_steps = 0
        found, held = free_budget(self._device, self._live.now()), self.held
        more_bytes = found.size_bytes - held.size_bytes
        if -_LESS * held.margin_bytes <= more_bytes <= _MORE * held.margin_bytes:
            return None
        self.held = found
        self._remarks.free_memory(found.size_bytes, found.told("what is free by now"))
        return found

    def stop(self) -> None:
        """Do nothing: looking holds nothing."""
