"""What budget="auto" means for a profile: what is free now on its device, less a margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ground import messages
from ..ground.errors import UsageError
from ..ir import Profile
from .budgets import is_free, parse_budget

if TYPE_CHECKING:
    from ..torchtools.free_budget import FreeBudget


def budget_bytes_of(profile: Profile, budget: float | str) -> int:
    """A budget for the step of a profile in bytes: "auto", or whatever `parse_budget` takes.

    Raises:
        UsageError: as `parse_budget`; or the device of the profile is not here.
    """
    if not is_free(budget):
        return parse_budget(budget, profile.peak_bytes)
    from ..torchtools.free_budget import less_a_margin

    if profile.device.modelled:
        found, what = less_a_margin(profile.device.memory_bytes), f"all of {profile.device.name}"
    else:
        found, what = _free_here(profile.device.kind), "what is free now"
    messages.tell(f"the budget is {found.told(what)}")
    return found.size_bytes


def _free_here(kind: str) -> FreeBudget:
    import torch

    from ..torchtools.accelerators import is_available
    from ..torchtools.free_budget import free_budget
    from ..torchtools.memory_trace import live_bytes

    if not is_available(kind):
        raise UsageError(f"the profile is of a {kind} device, and there is none here: give bytes, such as 16GiB")
    device = torch.device(kind)
    return free_budget(device, live_bytes(device))
