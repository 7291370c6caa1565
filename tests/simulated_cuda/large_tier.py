"""Plans that swap gigabytes, and what of the host they lock: `python -m tests.simulated_cuda.large_tier`, memory mode.

Prints as JSON what was locked while each plan was applied, and why a plan was refused under a limit.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from pooch.api.manual import plan_from_decisions
from pooch.errors import TierError
from pooch.executor import apply_plan
from pooch.executor.engines.pinned import blocks_kept
from pooch.ir import Link, Plan, Profile
from pooch.profiler import ProfileOptions, profile_step
from pooch.torchtools import cuda_only, device_memory

GIB = 2**30
LAYERS = 14
LINK = Link("a fast tier", 0.01, 0.01, 1e6, 1e6)


class Chain(nn.Module):
    """Ops that save 1 GiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device="cuda"))
        self.rows = torch.ones(GIB // 4, device="cuda")

    def forward(self) -> Tensor:
        hidden = self.rows * self.scale
        for _ in range(LAYERS):
            hidden = hidden.sin()
        return hidden.sum()


class Locked:
    """What is locked, and what was: notes each call."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.most: list[int] = []
        self._lock, self._unlock = cuda_only.lock_pages, cuda_only.unlock_pages
        cuda_only.lock_pages, cuda_only.unlock_pages = self.lock, self.unlock

    def lock(self, pointer: int, size_bytes: int, device: torch.device) -> int:
        code = self._lock(pointer, size_bytes, device)
        assert code == 0
        self.now[pointer] = size_bytes
        if sum(self.now.values()) > sum(self.most):
            self.most = list(self.now.values())
        return code

    def unlock(self, pointer: int) -> None:
        self._unlock(pointer)
        del self.now[pointer]


def swapping(profile: Profile, many: int) -> Plan:
    """A plan that swaps so many of the values of 1 GiB."""
    large = [value.id for value in profile.activations if value.size_bytes == GIB]
    return plan_from_decisions(profile, dict.fromkeys(large[:many], "swap"), region="step")


def stepped(model: Chain, plan: Plan, locked: Locked, steps: int = 2) -> dict[str, Any]:
    """Train under a plan; what was locked at the most, and what is still locked afterwards."""
    with apply_plan(plan, model, verify="off") as run:
        before = list(locked.now.values())
        for _ in range(steps):
            with run.step():
                loss = model()
            loss.backward()
            del loss
            model.scale.grad = None
        swapped = run.stats.swapped_in_bytes
    return {
        "needed": plan.schedule.host_bytes, "before_the_first_step": before, "most": locked.most, "swapped": swapped,
        "left": list(locked.now.values()),
    }  # fmt: skip


def refused(model: Chain, plan: Plan, limit_bytes: int) -> str:
    """What a control group of some bytes makes of a plan."""
    device_memory.left_by_control_groups = lambda: [limit_bytes]
    try:
        apply_plan(plan, model).remove()
    except TierError as error:
        return str(error)
    return ""


def main() -> None:
    locked, model = Locked(), Chain()
    profile = profile_step(model, model, None, LINK, ProfileOptions(warmup=0, mode="run")).profile
    found: dict[str, Any] = {}
    for name, many in (("large", 12), ("small", 3)):
        locked.most = []
        found[name] = stepped(model, swapping(profile, many), locked)
    locked.most = []
    with blocks_kept():  # as a guard keeps them
        for many in (1, 3):
            stepped(model, swapping(profile, many), locked, steps=1)
        found["in_turn"] = locked.most
    found |= {
        "refused": refused(model, swapping(profile, 12), 8 * GIB),
        "left": list(locked.now.values()),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
